"""Every setting of a run: its groups, their validation, and how a file is read."""
