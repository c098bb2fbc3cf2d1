"""The network transport of islands: coordinator, groups, servers. Only here is PyTorch imported, and late."""
