"""The last step of continual training."""

from kfp import dsl
from tidemill_components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def record_progress(config: str, summary: str) -> None:
    """Note how far the prompts were used, so that the next run takes those that come after.

    Args:
        config: the resolved settings as YAML text.
        summary: what `register` returned; it orders the steps.
    """
    from tidemill.steps.renewal import record_progress as step

    step(config, summary)
