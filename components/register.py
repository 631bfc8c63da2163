"""The step that registers the model."""

from kfp import dsl
from tidemill_components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def register(
    config: str,
    summary: str,
    evaluation: str,
    report: dsl.Output[dsl.Markdown],
    page: dsl.Output[dsl.HTML],
    model: dsl.Output[dsl.Model],
) -> str:
    """Make the model a version of the registry if its score passes the gate, and write the reports.

    Args:
        config: the resolved settings as YAML text.
        summary: what `train` returned.
        evaluation: what `evaluate` returned.
        report: gets the table of before and after.
        page: gets the report with curve and answers.
        model: gets the place of the weights in the object store, and its version.

    Returns:
        JSON: the final summary, with the model version, or null if the gate refused it.
    """
    from tidemill.steps.steps import register as step

    return step(config, summary, evaluation, report.path, page.path, model)
