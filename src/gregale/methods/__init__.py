"""Synchronisation methods: PSDP, DiLoCo, Streaming DiLoCo, and one island of a fleet."""
