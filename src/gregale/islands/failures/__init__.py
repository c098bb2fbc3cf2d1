"""What failures cost a fleet of islands: the real protocol in a model of time, beside data-parallel."""
