"""Islands: training runs at separate sites that DiLoCo synchronises over a network while membership changes.

`protocol` makes the decisions and is pure. `transport` exchanges data. `driver` connects the two.
"""
