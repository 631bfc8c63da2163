"""All pipelines, by the names that the command line and the files below `compiled/` have."""

from tidemill_pipelines.continual import continual
from tidemill_pipelines.post_training import post_training
from tidemill_pipelines.sweep import sweep

PIPELINES = {"post_training": post_training, "sweep": sweep, "continual": continual}
