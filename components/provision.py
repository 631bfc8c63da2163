"""The step that gets a run what it runs on."""

from kfp import dsl
from tidemill_components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def provision(config: str) -> str:
    """Start the embedded store and make the model ready.

    Args:
        config: the resolved settings as YAML text.

    Returns:
        JSON: where the store, the model and the Ray cluster are.
    """
    from tidemill.steps.steps import provision as step

    return step(config)
