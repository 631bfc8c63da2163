"""Train the model."""

from kfp import dsl
from tidemill_components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def train(config: str, provisioned: str, metrics: dsl.Output[dsl.Metrics]) -> str:
    """Train to the end; a retried step resumes from the newest checkpoint.

    Args:
        config: the resolved settings as YAML text.
        provisioned: result of `provision`.
        metrics: gets the numbers of the summary.

    Returns:
        JSON: the summary of the run.
    """
    from tidemill.steps.retries import retried
    from tidemill.steps.training import train as step

    return retried(step, limit_s=None)(config, provisioned, metrics.log_metric)
