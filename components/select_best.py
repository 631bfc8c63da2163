"""Select and register the best variant of a sweep."""

from kfp import dsl
from tidemill_components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def select_best(
    config: str,
    overrides: str,
    run_name: str,
    kfp_run: str,
    results: list,  # type: ignore[type-arg]  # KFP knows it by this name
    report: dsl.Output[dsl.Markdown],
    page: dsl.Output[dsl.HTML],
    model: dsl.Output[dsl.Model],
) -> str:
    """Make the variant with the best score a version of the registry if it passes the gate.

    Args:
        config: settings, see `Request`; "" for those of the form.
        overrides: KEY.PATH=VALUE, one a line, or in one line [KEY.PATH=VALUE, ...].
        run_name: name of the sweep, "" for a new sweep.
        kfp_run: id of the KFP run.
        results: results of `finish_variant`.
        report: gets the table of variants and the report of the best one.
        page: gets the report of the best variant with its curve and answers.
        model: gets the location of the best weights, and their version.

    Returns:
        JSON: the final summary of the best variant, with the model version, null if the gate refused it.
    """
    from tidemill.steps.request import Request
    from tidemill.steps.retries import retried
    from tidemill.steps.sweep import select_best as step

    request = Request(config, overrides, run_name, kfp_run)
    return retried(step)(request, results, report.path, page.path, model)
