"""The step that refuses a run which cannot succeed."""

from kfp import dsl
from tidemill_components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def validate(config: str) -> str:
    """Check settings, prompts, rewards, model, store and room before anything is paid for.

    Args:
        config: the run's settings as YAML text.

    Returns:
        The resolved settings as YAML text, every default written out.
    """
    from tidemill.steps import validate as step

    return step(config)
