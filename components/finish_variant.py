"""Finish a variant of a sweep."""

from kfp import dsl
from tidemill_components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def finish_variant(config: str, summary: str, evaluation: str, metrics: dsl.Output[dsl.Metrics]) -> str:
    """Write the reports of a variant; `select_best` may register it later.

    Args:
        config: the resolved settings of the variant as YAML text.
        summary: result of `train`.
        evaluation: result of `evaluate`.
        metrics: gets the score.

    Returns:
        JSON: name, scores and steps; the store holds the settings and the final summary.
    """
    from tidemill.steps.retries import retried
    from tidemill.steps.sweep import finish_variant as step

    return retried(step)(config, summary, evaluation, metrics.log_metric)
