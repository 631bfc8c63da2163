"""Runs on this machine: commands that start them, follow them and clean up."""
