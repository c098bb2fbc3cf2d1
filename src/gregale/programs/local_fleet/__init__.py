"""`gregale islands`: several islands on this machine, each in its own process."""
