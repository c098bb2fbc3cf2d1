"""Generation of text with a trained model."""
