"""`gregale train`: trains, evaluates, saves, and goes on where it stopped."""
