"""What outlives a run: objects, checkpoints, metrics, model versions."""
