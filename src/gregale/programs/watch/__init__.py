"""`gregale watch`: a run while it trains, in the terminal or on a page."""
