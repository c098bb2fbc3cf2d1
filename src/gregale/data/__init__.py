"""From documents to batches: sources, tokenizers, token stores, mixtures, examples."""
