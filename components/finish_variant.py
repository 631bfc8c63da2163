"""The last step of a variant of a sweep."""

from kfp import dsl
from tidemill_components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def finish_variant(config: str, summary: str, evaluation: str, metrics: dsl.Output[dsl.Metrics]) -> str:
    """Write the reports of a variant, which is registered only if it is the best.

    Args:
        config: the resolved settings of the variant as YAML text.
        summary: what `train` returned.
        evaluation: what `evaluate` returned.
        metrics: gets the score.

    Returns:
        JSON: name, scores and steps; the store has the settings and the final summary.
    """
    from tidemill.steps.sweep import finish_variant as step

    return step(config, summary, evaluation, metrics.log_metric)
