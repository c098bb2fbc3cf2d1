"""The SPMD pipeline: layers in stages that all work at the same time, each on its own microbatch (DESIGN section 6)."""
