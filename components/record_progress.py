"""Record the progress of continual training."""

from kfp import dsl
from tidemill_components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def record_progress(config: str, summary: str) -> None:
    """Record the last prompts that were used, so that the next run continues after them.

    Args:
        config: the resolved settings as YAML text.
        summary: result of `register`; it only orders the steps.
    """
    from tidemill.steps.continual import record_progress as step
    from tidemill.steps.retries import retried

    retried(step)(config, summary)
