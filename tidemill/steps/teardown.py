"""The step `teardown`: the exit handler of every pipeline, which releases what the run or the sweep took."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tidemill.config.kubernetes import KubernetesConfig
from tidemill.config.run import RunConfig
from tidemill.errors import ClusterError, ConfigError, RunError, StoreError, TidemillError, is_retryable
from tidemill.kuberay.release import release_this_pipeline
from tidemill.steps.provider import provider_of
from tidemill.steps.refusal import explained
from tidemill.steps.request import Request
from tidemill.steps.sweep import variant_configs


def release_run(config: RunConfig) -> None:
    provider_of(config).teardown()


@explained()
def teardown(
    request: Request,
    variants: str,
    *,
    release_pipeline: Callable[[str, set[str]], None] = release_this_pipeline,
    release: Callable[[RunConfig], None] = release_run,
) -> None:
    """Release every run of a pipeline; an error of one run does not stop the release of the others.

    Invalid settings never started anything. But settings in the store may have changed or become unreadable since the
    run started. So everything with the label of the KFP run is deleted first.

    Args:
        request: the parameters of the pipeline.
        variants: those of a sweep, see `sweep.variant_configs`; "" for a single run.
        release_pipeline: deletes what has the label of a KFP run in some namespaces.
        release: releases one run.

    Raises:
        RunError, ClusterError: naming everything that was not released; RunError if another try may release some of it.
    """
    try:
        configs = list(variant_configs(request, variants)) if variants else [request.settings()]
    except (ConfigError, StoreError):
        configs = []
    namespaces = {KubernetesConfig().namespace, *(config.kubernetes.namespace for config in configs)}
    problems: list[TidemillError] = []
    for action in (partial(release_pipeline, request.kfp_run, namespaces), *(partial(release, c) for c in configs)):
        try:
            action()
        except TidemillError as error:
            problems.append(error)
    if problems:
        kind = RunError if any(map(is_retryable, problems)) else ClusterError
        raise kind("; ".join(map(str, problems)))
