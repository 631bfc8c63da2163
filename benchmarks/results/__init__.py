"""What every benchmark writes."""
