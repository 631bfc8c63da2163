"""Converts verl commands to run files."""
