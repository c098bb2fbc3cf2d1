"""Named axes: the mesh, its mappings, and how weights are gathered for use."""
