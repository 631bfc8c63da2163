"""Generation and training without models, under a virtual clock: see `pacing.py`."""
