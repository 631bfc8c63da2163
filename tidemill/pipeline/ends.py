"""How a pipeline begins and how it ends, around the steps that all have in common."""

from __future__ import annotations

from pathlib import Path

from tidemill.errors import ConfigError, StoreError
from tidemill.kuberay.release import release_this_pipeline
from tidemill.observe.links import links
from tidemill.pipeline.request import Request
from tidemill.pipeline.steps import teardown, validate
from tidemill.pipeline.sweep import variants as split


def begin(request: Request, page: str) -> str:
    """Refuse a run that cannot succeed, and write where to look while it goes on.

    Args:
        request: what a person asks for.
        page: file for the page of links.

    Returns:
        The resolved settings as YAML.

    Raises:
        TidemillError: naming what is wrong and what to do.
    """
    config = request.settings()
    Path(page).write_text(links(config, request.kfp_run), encoding="utf-8")
    return validate(config.to_yaml())


def end(request: Request, variants: str) -> None:
    """Give back what a run took, or all variants of a sweep.

    Settings that are refused never got anything; but they may lie in a store that does not answer any more.

    Args:
        request: what a person asked for.
        variants: those of a sweep, see `sweep.variants`; "" for a single run.
    """
    try:
        configs = list(split(request, variants)) if variants else [request.settings()]
    except (ConfigError, StoreError):
        release_this_pipeline(request.kfp_run)
        return
    for config in configs:
        teardown(config.to_yaml())
