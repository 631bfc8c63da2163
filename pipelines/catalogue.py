"""All pipelines, by the names that the command line and the files below `compiled/` have."""

from tidemill_pipelines.post_training import post_training

PIPELINES = {"post_training": post_training}
