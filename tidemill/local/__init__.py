"""A run on this machine, from the first line on the screen to the last process."""
