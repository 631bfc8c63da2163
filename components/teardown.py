"""Release everything at the end of a pipeline."""

from kfp import dsl
from tidemill_components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def teardown(config: str, overrides: str, run_name: str, kfp_run: str, variants: str) -> None:
    """Release everything that the run took, also after a failure.

    Args:
        config: settings, see `Request`; "" for those of the form.
        overrides: KEY.PATH=VALUE, one a line, or in one line [KEY.PATH=VALUE, ...].
        run_name: name of the run, "" for a new run.
        kfp_run: id of the KFP run.
        variants: those of a sweep, "" for a single run.
    """
    from tidemill.steps.request import Request
    from tidemill.steps.retries import retried
    from tidemill.steps.teardown import teardown as step

    retried(step, tries=None)(Request(config, overrides, run_name, kfp_run), variants)
