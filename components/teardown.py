"""The step that always runs last."""

from kfp import dsl
from tidemill_components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def teardown(config: str) -> None:
    """Give back everything that `provision` took, also after a failure.

    Args:
        config: the run's settings as YAML text, as the pipeline got them.
    """
    from tidemill.steps import teardown as step

    step(config)
