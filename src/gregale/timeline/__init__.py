"""A timeline model of a run over slow links: compute, transfers and waits."""
