"""The step that registers the model."""

from kfp import dsl
from tidemill_components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def register(config: str, summary: str, evaluation: str, report: dsl.Output[dsl.Markdown]) -> str:
    """Make the model a version of the registry if its score passes the gate, and write the report.

    Args:
        config: the resolved settings as YAML text.
        summary: what `train` returned.
        evaluation: what `evaluate` returned.
        report: gets the table of before and after.

    Returns:
        JSON: the final summary, with the model version, or null if the gate refused it.
    """
    from tidemill.steps import register as step

    return step(config, summary, evaluation, report.path)
