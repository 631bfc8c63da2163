"""Start what a run needs."""

from kfp import dsl
from tidemill_components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def provision(config: str) -> str:
    """Start the store and fetch the model, or start a Ray cluster on Kubernetes.

    Args:
        config: the resolved settings as YAML text.

    Returns:
        JSON: where the store and the model are, or the Ray cluster.
    """
    from tidemill.steps.retries import retried
    from tidemill.steps.training import provision as step

    return retried(step)(config)
