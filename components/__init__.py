"""KFP components: one thin file each, a signature and one call into the engine."""
