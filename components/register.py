"""Register the trained model."""

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
        summary: result of `train`.
        evaluation: result of `evaluate`.
        report: gets the table of before and after.
        page: gets the report with the curve and the answers.
        model: gets the location of the weights in the store, and their version.

    Returns:
        JSON: the final summary, with the model version, null if the gate refused it.
    """
    from tidemill.steps.register import register as step
    from tidemill.steps.retries import retried

    return retried(step)(config, summary, evaluation, report.path, page.path, model)
