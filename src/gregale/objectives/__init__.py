"""The function that a run minimises: of a batch, of a model, and of its frozen weights."""
