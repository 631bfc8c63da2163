"""The Ray cluster, services and processes of a run on one machine."""
