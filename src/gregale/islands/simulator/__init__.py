"""A seeded world for the islands' protocol: real members, modelled coordinator, network, engine and trainers."""
