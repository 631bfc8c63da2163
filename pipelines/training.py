"""The part that all pipelines share: provision ─► train ─► evaluate."""

from kfp.dsl.pipeline_channel import PipelineChannel
from tidemill_components.evaluate import evaluate
from tidemill_components.provision import provision
from tidemill_components.train import train
from tidemill_pipelines.tasks import LONGEST, Pod


def training_steps(pod: Pod, settings: PipelineChannel) -> tuple[PipelineChannel, PipelineChannel]:
    """From checked settings to what training and evaluation return.

    Args:
        pod: of the steps.
        settings: of one run, as YAML text.
    """
    provisioned = pod.retryable(provision(config=settings)).outputs["Output"]
    summary = pod.retryable(train(config=settings, provisioned=provisioned), LONGEST).outputs["Output"]
    return summary, pod.retryable(evaluate(config=settings, summary=summary)).outputs["Output"]
