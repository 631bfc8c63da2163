"""How a pipeline begins and how it ends, around the steps that all have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tidemill.config.kubernetes import KubernetesConfig
from tidemill.errors import ConfigError, RunError, StoreError, TidemillError
from tidemill.kuberay.release import release_this_pipeline
from tidemill.observe.markdown import links
from tidemill.steps.request import Request
from tidemill.steps.steps import teardown, validate
from tidemill.steps.sweep import variants as split


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
    """Give back what a run took, or all variants of a sweep; what cannot be given back does not keep the rest.

    Settings that are refused never got anything. But those in the store may say something else by now than they did at
    the beginning, and the store may not answer any more: so whatever carries the KFP run's label goes first.

    Args:
        request: what a person asked for.
        variants: those of a sweep, see `sweep.variants`; "" for a single run.

    Raises:
        RunError: naming all that is not given back.
    """
    try:
        configs = list(split(request, variants)) if variants else [request.settings()]
    except (ConfigError, StoreError):
        configs = []
    namespaces = {KubernetesConfig().namespace, *(config.kubernetes.namespace for config in configs)}
    problems = [*failed(lambda: release_this_pipeline(request.kfp_run, namespaces))]
    for config in configs:
        problems += failed(partial(teardown, config.to_yaml()))
    if problems:
        raise RunError("; ".join(problems))


def failed(give_back: Callable[[], None]) -> Iterator[str]:
    """Do it; says why it could not be done."""
    try:
        give_back()
    except TidemillError as error:
        yield str(error)
