"""The commands of `tidemill`, by where they act; `cli.py` calls them."""
