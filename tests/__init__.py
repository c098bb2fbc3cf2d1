"""One package, so that test folders can share helpers."""
