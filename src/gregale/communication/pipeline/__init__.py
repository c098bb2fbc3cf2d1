"""The SPMD pipeline: layers in stages that all work at the same time, each on its own microbatch.

docs/design.md, "Pipeline design", has the reasons.
"""
