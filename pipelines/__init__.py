"""KFP pipelines over the components."""
