"""Synchronisation methods: PSDP, DiLoCo and Streaming DiLoCo."""
