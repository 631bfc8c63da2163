"""The first step of continual training."""

from typing import NamedTuple

from kfp import dsl
from tidemill_components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def prepare_continual(
    config: str,
    overrides: str,
    run_name: str,
    kfp_run: str,
    gpu_type: str,
    engines: int,
    ranks: int,
    image: str,
    gpu_hours: float,
    prompts: str,
    links: dsl.Output[dsl.Markdown],
) -> NamedTuple("Renewal", [("settings", str), ("Output", str)]):  # type: ignore[valid-type]  # KFP reads it
    """Find the champion and the prompts that came since, and check the run that they make.

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
        prompts: s3://BUCKET/PREFIX/ of .jsonl files, or any source of prompts.
        links: gets the places to look at while the run goes on.

    Returns:
        The resolved settings as YAML text, and as `Output` what to do: `train` or, without new prompts,
        `wait`.
    """
    from tidemill.steps.renewal import prepare_continual as step
    from tidemill.steps.request import Request

    asked = Request(config, overrides, run_name, kfp_run, gpu_type, engines, ranks, image, gpu_hours)
    return step(asked, prompts, links.path)
