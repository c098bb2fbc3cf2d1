"""`gregale plan`: what a run will take, from the programs that it would compile."""
