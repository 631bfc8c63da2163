"""One training run: what wires its parts and keeps its schedule."""
