"""The exported model's score, in a pod of an engine: where the driver is there may be no GPU and little memory."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import ray

from tidemill.actors.call import call
from tidemill.actors.placement import engine_place
from tidemill.config.run import RunConfig
from tidemill.protocols import Evaluation

NAME = "the engine that scores the exported model"


class ScorerActor:
    """Scores one model."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    async def ready(self) -> None:
        """Answers once the actor has its place."""

    async def score(self, model: str) -> Evaluation:
        """Bring the model to this pod and answer the held-out prompts; see `scoring.answer_held_out`."""
        from tidemill.models.locate import Locator
        from tidemill.rollout.scoring import answer_held_out

        with TemporaryDirectory(prefix="tidemill-model-") as folder:
            return await answer_held_out(self.config, Locator.of(self.config).fetch_model(model, Path(folder)).path)


async def score_remotely(config: RunConfig, model: str) -> Evaluation:
    """Greedy answers of a model of the store to `data.held_out`, from a fresh engine in the place of an earlier one.

    Args:
        config: of the run.
        model: `s3://...`, as `Summary.model_uri`.

    Raises:
        TidemillError: the engine, a reward function or the data fails.
    """
    from tidemill.inference.engine import engine_environment

    place = engine_place(config)
    options = place.options(engine_environment(config.rollout, place.gpus))
    actor = ray.remote(ScorerActor).options(**options).remote(config)
    await call(NAME, actor.ready.remote(), config.kubernetes.start_timeout_s)
    return await call(NAME, actor.score.remote(model), None)  # the engine has deadlines of its own
