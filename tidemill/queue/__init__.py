"""Finished groups on their way from the rollouter to the trainer."""
