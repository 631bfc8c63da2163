"""Validate a run."""

from kfp import dsl
from tidemill_components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def validate(
    config: str,
    overrides: str,
    run_name: str,
    kfp_run: str,
    gpu_type: str,
    engines: int,
    ranks: int,
    image: str,
    gpu_hours: float,
    links: dsl.Output[dsl.Markdown],
) -> str:
    """Check settings, prompts, rewards, model, store and capacity before the run uses a GPU.

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
        links: gets the links to follow the run.

    Returns:
        The resolved settings as YAML text, with every default.
    """
    from tidemill.steps.request import Request
    from tidemill.steps.validate import validate as step

    request = Request(config, overrides, run_name, kfp_run, gpu_type, engines, ranks, image, gpu_hours)
    return step(request, links.path)
