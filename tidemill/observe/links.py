"""Where to look while a run goes on, as Markdown: the page that the first step of a pipeline shows."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from tidemill.config.names import RUN_LABEL
from tidemill.config.run import RunConfig

DASHBOARD_PORT = 8265
DASHBOARD, STOP = "Ray dashboard", "End it"
"""Rows of what only a cluster that is there shows, and of what only a run that goes on can be told."""


def links(config: RunConfig, kfp_run: str) -> str:
    """The places of a run.

    Args:
        config: its settings.
        kfp_run: id of its KFP run, "" outside of KFP.
    """
    # A link that begins with # stays in the KFP UI that shows the page, wherever that is.
    here = kfp_run and config.cluster.provider == "kuberay"
    run = f"[{config.name}](#/runs/details/{kfp_run})" if here else config.name
    return f"# Run {run}\n\n{places(config)}"


def places(config: RunConfig) -> str:
    """The table of them, which MLflow shows as the description of the run."""
    rows = cluster_rows(config) if config.cluster.provider == "kuberay" else local_rows(config)
    table = "\n".join(f"| {what} | {where} |" for what, where in rows)
    return f"| | |\n|---|---|\n{table}\n"


def cluster_rows(config: RunConfig) -> Iterator[tuple[str, str]]:
    """(what, where) in a cluster: an address inside it, and for a browser the port to forward."""
    kubernetes = config.kubernetes
    pages = kubernetes.pages
    namespace = kubernetes.namespace
    head = f"{RUN_LABEL}={config.name},ray.io/node-type=head"
    pod = f"$(kubectl -n {namespace} get pod -l {head} -o name)"
    forward = f"`kubectl -n {namespace} port-forward {pod} {DASHBOARD_PORT}`, then http://127.0.0.1:{DASHBOARD_PORT}"
    yield (
        "Progress and log",
        f"`tidemill status {config.name}`, `tidemill logs {config.name}`, or the log of step `train`",
    )
    yield DASHBOARD, pages.get("ray") or forward
    yield (
        "MLflow",
        f"{pages.get('mlflow') or forwarded(config.tracking.uri)}, experiment `{config.tracking.experiment}`",
    )
    yield "Registered model", f"`{config.registered_model}`, alias `{config.registry.alias}`"
    store = pages.get("store") or forwarded(config.store.endpoint)
    yield "Store", f"{store}, bucket `{config.store.bucket}`, `runs/{config.name}/`"
    yield STOP, f"`tidemill stop {config.name}`: after a checkpoint"


def forwarded(address: str | None) -> str:
    """How a browser outside of the cluster reaches an address; one that is no service's needs nothing."""
    parts = urlsplit(address or "")
    service, _, domain = (parts.hostname or "").partition(".")
    namespace, _, kind = domain.partition(".")
    if kind.partition(".")[0] != "svc" or parts.port is None:
        return str(address)
    local = f"{parts.scheme}://127.0.0.1:{parts.port}"
    return f"`kubectl -n {namespace} port-forward svc/{service} {parts.port}`, then {local}"


def local_rows(config: RunConfig) -> Iterator[tuple[str, str]]:
    """(what, where) on this machine."""
    yield "Folder", f"`{config.folder}`: events.jsonl, log.txt, summary.json"
    yield "MLflow", config.tracking.uri or f"`tidemill ui --output {config.output}`"
    yield "Registered model", f"`{config.registered_model}`, alias `{config.registry.alias}`"
    yield "Store", f"{config.store.endpoint}, bucket `{config.store.bucket}`, `runs/{config.name}/`"
