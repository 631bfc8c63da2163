"""The object store and the durable state of a run: checkpoints, lease, journals."""
