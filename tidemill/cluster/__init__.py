"""Where the Ray cluster of a run comes from."""
