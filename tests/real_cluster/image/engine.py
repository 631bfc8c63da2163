"""A stub of the engine for tests on a cluster: it scores every model alike."""

from __future__ import annotations

from tidemill.config.run import RunConfig
from tidemill.protocols import Answer, Evaluation


async def score_remotely(config: RunConfig, model: str) -> Evaluation:
    """The same score for every model."""
    del config, model
    return Evaluation(1, 0.75, (Answer("2 + 6", "8", "8", 1.0),))
