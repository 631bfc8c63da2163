"""Models: found by name, fetched, converted."""
