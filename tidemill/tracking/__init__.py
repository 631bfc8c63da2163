"""MLflow: runs, metrics and registered models."""
