"""What the steps of the pipelines do; `components/` calls it, from KFP's pods or from this machine."""
