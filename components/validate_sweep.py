"""The first step of a sweep."""

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
    """Check every variant of a sweep before anything is paid for.

    Args:
        config: settings as YAML text, s3://BUCKET/KEY of such a file, or its path.
        overrides: KEY.PATH=VALUE, one a line, or in one line [KEY.PATH=VALUE, ...].
        run_name: name of the run, "" for a new one.
        kfp_run: id of the KFP run.
        gpu_type: kubernetes.gpu_type, "" as the settings say.
        engines: rollout.engines, 0 as the settings say.
        ranks: trainer.ranks, 0 as the settings say.
        image: kubernetes.image, "" as the settings say.
        gpu_hours: kubernetes.gpu_hours, 0 as the settings say.
        variants: one a line, its overrides with spaces between them, or in one line [VARIANT, ...].
        links: gets the places to look at while the sweep goes on.

    Returns:
        The resolved settings of every variant as YAML text.
    """
    from tidemill.steps.request import Request
    from tidemill.steps.sweep import validate_sweep as step

    asked = Request(config, overrides, run_name, kfp_run, gpu_type, engines, ranks, image, gpu_hours)
    return step(asked, variants, links.path)
