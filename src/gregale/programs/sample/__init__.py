"""`gregale sample`: continues prompts with a trained model; and the texts that a run makes while it trains."""
