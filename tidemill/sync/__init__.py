"""Weights of a new version on their way from the trainer to the engines."""
