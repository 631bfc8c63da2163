"""Score the trained model."""

from kfp import dsl
from tidemill_components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def evaluate(config: str, summary: str, metrics: dsl.Output[dsl.Metrics]) -> str:
    """Load the exported model in a fresh engine and answer the held-out prompts greedily.

    Args:
        config: the resolved settings as YAML text.
        summary: result of `train`.
        metrics: gets the score.

    Returns:
        JSON: score, answers, and what was skipped.
    """
    from tidemill.steps.retries import retried
    from tidemill.steps.training import evaluate as step

    return retried(step)(config, summary, metrics.log_metric)
