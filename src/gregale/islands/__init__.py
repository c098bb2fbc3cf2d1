"""Islands: runs of their own that train apart, joined by DiLoCo over a network, while members come, go and die.

`protocol` decides and is pure; `engine` is what really exchanges; `driver` joins the two.
"""
