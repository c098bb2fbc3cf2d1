"""A model of the timeline of a run over slow links: compute, transfers, and what waits for what."""
