"""From verl's command line to our settings."""
