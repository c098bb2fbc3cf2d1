"""`gregale report`: what runs have written, as a page for a browser."""
