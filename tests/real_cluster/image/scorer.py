"""A stub of the evaluation of a model for tests on a cluster."""

from __future__ import annotations

from tidemill.config.run import RunConfig
from tidemill.protocols import Answer, Evaluation


async def score_remotely(config: RunConfig, model: str) -> Evaluation:
    """The same score for every model."""
    del config, model
    return Evaluation(1, 0.75, (Answer("2 + 6", "8", "8", 1.0),))
