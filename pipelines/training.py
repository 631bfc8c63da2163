"""The steps that all pipelines share: provision ─► train ─► evaluate."""

from kfp.dsl.pipeline_channel import PipelineChannel
from tidemill_components.evaluate import evaluate
from tidemill_components.provision import provision
from tidemill_components.train import train
from tidemill_pipelines.tasks import LONGEST, Pod


def training_steps(pod: Pod, settings: PipelineChannel) -> tuple[PipelineChannel, PipelineChannel]:
    """Adds the steps of one run; returns the results of `train` and `evaluate`.

    Args:
        pod: of the steps.
        settings: of the run, as YAML text.
    """
    provisioned = pod.retryable(provision(config=settings)).outputs["Output"]
    summary = pod.retryable(train(config=settings, provisioned=provisioned), LONGEST).outputs["Output"]
    return summary, pod.retryable(evaluate(config=settings, summary=summary)).outputs["Output"]
