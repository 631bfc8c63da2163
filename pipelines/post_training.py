"""The pipeline of one run.

    validate ─► provision ─► train ─► evaluate ─► register
        └──────────── exit handler: teardown ────────┘

The same graph runs through the KFP local runner (`tidemill run`) and on a cluster. Nothing is cached: every step
either acts on the outside or depends on what does.
"""

from kfp import dsl
from tidemill_components.evaluate import evaluate
from tidemill_components.provision import provision
from tidemill_components.register import register
from tidemill_components.teardown import teardown
from tidemill_components.train import train
from tidemill_components.validate import validate


def uncached(task: dsl.PipelineTask) -> dsl.PipelineTask:
    """The task, run every time."""
    return task.set_caching_options(False)


def retried(task: dsl.PipelineTask) -> dsl.PipelineTask:
    """The task, tried again after a failure: it finds what the first try left and goes on from there."""
    return task.set_retry(num_retries=2, backoff_duration="5s", backoff_factor=2.0, backoff_max_duration="60s")


@dsl.pipeline(name="post-training", description="Asynchronous reinforcement learning of a language model")
def post_training(config: str) -> None:
    """Train a model as `config` says, and register it if it became better.

    Args:
        config: the run's settings as YAML text.
    """
    with dsl.ExitHandler(uncached(teardown(config=config)), name="run"):
        settings = uncached(validate(config=config)).outputs["Output"]
        provisioned = retried(uncached(provision(config=settings)))
        trained = retried(uncached(train(config=settings, provisioned=provisioned.outputs["Output"])))
        summary = trained.outputs["Output"]
        evaluated = uncached(evaluate(config=settings, summary=summary))
        uncached(register(config=settings, summary=summary, evaluation=evaluated.outputs["Output"]))
