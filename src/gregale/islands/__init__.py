"""Islands: training across sites that come, go and die."""
