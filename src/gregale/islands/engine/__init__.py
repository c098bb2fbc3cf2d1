"""The real engine of islands: coordinator, groups, servers. Only here are torch and torchft imported, and late."""
