"""Training across sites that come, go and die."""
