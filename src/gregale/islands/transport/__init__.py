"""The network transport of islands: coordinator, groups, servers, all over TLS connections of the fleet."""
