"""The training state, the guarded step, and the cache of compiled programs."""
