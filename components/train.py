"""The step that trains."""

from kfp import dsl
from tidemill_components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def train(config: str, provisioned: str, metrics: dsl.Output[dsl.Metrics]) -> str:
    """Run the asynchronous loop to its end; a retried step goes on from the newest checkpoint.

    Args:
        config: the resolved settings as YAML text.
        provisioned: what `provision` returned.
        metrics: gets the summary's numbers.

    Returns:
        JSON: the summary of the run.
    """
    from tidemill.steps.steps import train as step

    return step(config, provisioned, metrics.log_metric)
