"""The step that registers the best variant of a sweep."""

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
    """Make the best variant a version of the registry if its score passes the gate.

    Args:
        config: settings as YAML text, s3://BUCKET/KEY of such a file, or its path.
        overrides: KEY.PATH=VALUE, one a line, or in one line [KEY.PATH=VALUE, ...].
        run_name: name of the sweep, "" for a new one.
        kfp_run: id of the KFP run.
        results: what `finish_variant` returned for each variant.
        report: gets the table of variants and the report of the best one.
        page: gets the report of the best one with curve and answers.
        model: gets the place of the best one's weights, and its version.

    Returns:
        JSON: the final summary of the best one, with the model version, or null if the gate refused it.
    """
    from tidemill.steps.request import Request
    from tidemill.steps.sweep import select_best as step

    asked = Request(config, overrides, run_name, kfp_run)
    return step(asked, results, report.path, page.path, model)
