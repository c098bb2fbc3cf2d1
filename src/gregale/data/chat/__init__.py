"""Conversations as training text: sources, templates, and the tokens that the loss is on."""
