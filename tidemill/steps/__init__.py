"""The steps of the pipelines: what each component calls."""
