"""Trackers of a run's metrics: the console and `metrics.jsonl` always; TensorBoard, W&B and trackio on request."""
