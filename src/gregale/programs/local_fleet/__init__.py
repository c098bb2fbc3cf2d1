"""`gregale islands`: several islands on this machine, each a process of its own."""
