"""What a person sees of a run: metrics, progress, report."""
