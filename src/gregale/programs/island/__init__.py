"""`gregale island`: one island of a fleet."""
