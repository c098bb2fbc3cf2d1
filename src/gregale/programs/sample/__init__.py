"""Provides `gregale sample`, which continues prompts with a trained model, and the samples of a training run."""
