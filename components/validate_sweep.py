"""Validate a sweep."""

from kfp import dsl
from tidemill_components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def validate_sweep(
    config: str,
    overrides: str,
    run_name: str,
    kfp_run: str,
    gpu_type: str,
    engines: int,
    ranks: int,
    image: str,
    gpu_hours: float,
    variants: str,
    links: dsl.Output[dsl.Markdown],
) -> list:  # type: ignore[type-arg]  # KFP knows it by this name
    """Check every variant of a sweep before any of them uses a GPU.

    Args:
        config: settings as YAML text, s3://BUCKET/KEY of such a file, or its path.
        overrides: KEY.PATH=VALUE, one a line, or in one line [KEY.PATH=VALUE, ...].
        run_name: name of the run, "" for a new run.
        kfp_run: id of the KFP run.
        gpu_type: kubernetes.gpu_type, "" to keep the setting.
        engines: rollout.engines, 0 to keep the setting.
        ranks: trainer.ranks, 0 to keep the setting.
        image: kubernetes.image, "" to keep the setting.
        gpu_hours: kubernetes.gpu_hours, 0 to keep the setting.
        variants: one a line, each with its overrides separated by spaces; or in one line [VARIANT, ...].
        links: gets the links to follow the runs.

    Returns:
        The resolved settings of every variant as YAML text.
    """
    from tidemill.steps.request import Request
    from tidemill.steps.sweep import validate_sweep as step

    request = Request(config, overrides, run_name, kfp_run, gpu_type, engines, ranks, image, gpu_hours)
    return step(request, variants, links.path)
