"""All pipelines, by the names that the command line and the files below `compiled/` have."""

from typing import Any

PIPELINES = ("post_training", "sweep", "continual")


def pipeline_of(name: str) -> Any:
    """One of `PIPELINES`, KFP's object; imported alone, because KFP takes a second to build each of them.

    Raises:
        ValueError: there is no such pipeline.
    """
    match name:
        case "post_training":
            from tidemill_pipelines.post_training import post_training

            return post_training
        case "sweep":
            from tidemill_pipelines.sweep import sweep

            return sweep
        case "continual":
            from tidemill_pipelines.continual import continual

            return continual
        case _:
            raise ValueError(f"there is no pipeline {name!r}; there are {', '.join(PIPELINES)}")
