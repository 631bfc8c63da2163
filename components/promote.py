"""The step that makes a new champion."""

from kfp import dsl
from tidemill_components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def promote(config: str, summary: str, champion: str) -> str:
    """Give a version that passed the gate the champion's alias, and remember how far the prompts were used.

    Args:
        config: the resolved settings as YAML text.
        summary: what `register` returned.
        champion: the alias.

    Returns:
        NAME/VERSION of the new champion, or "".
    """
    from tidemill.renewal import promote as step

    return step(config, summary, champion)
