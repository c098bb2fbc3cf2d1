"""How the processes of a run find, authenticate, watch and stop each other."""
