"""The islands' protocol: events in, actions out; no sockets, clocks, threads or random numbers."""
