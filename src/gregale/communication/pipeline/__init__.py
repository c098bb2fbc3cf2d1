"""The SPMD pipeline: all stages work at once, each on its own microbatch (docs/design.md, "Pipeline design")."""
