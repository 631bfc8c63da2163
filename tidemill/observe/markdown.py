"""Where to look while a run goes on, as Markdown: the page that the first step of a pipeline shows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import urlsplit

from tidemill.config.names import RUN_LABEL
from tidemill.config.run import RunConfig
from tidemill.observe.report import CELL, Sample, Summary, facts, left_out, scores
from tidemill.observe.text import excerpt

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
    return f"# Run {run}\n\n{links_table(config)}"


def links_table(config: RunConfig) -> str:
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
        f"{pages.get('mlflow') or port_forward(config.tracking.uri)}, experiment `{config.tracking.experiment}`",
    )
    yield "Registered model", f"`{config.registered_model}`, alias `{config.registry.alias}`"
    store = pages.get("store") or port_forward(config.store.endpoint)
    yield "Store", f"{store}, bucket `{config.store.bucket}`, `runs/{config.name}/`"
    yield STOP, f"`tidemill stop {config.name}`: after a checkpoint"


def port_forward(address: str | None) -> str:
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


SPECIAL = re.compile(r"([\\`*_\[\]<>|~&$#])")


def report(name: str, summary: Summary) -> str:
    """The report.

    Args:
        name: of the run.
        summary: how it ended.
    """
    model = summary.model_uri if summary.model_version is None else f"models:/{summary.model_version}"
    parts = [
        f"# {escaped(name)}",
        f"**{escaped(str(scores(summary)))}**",
        *(f"- {escaped(line)}" for line in left_out(summary)),
        table(("run", ""), [(fact.label, fact.text) for fact in facts(summary)]),
        answers(summary.samples),
        f"Ask the trained model: `tidemill generate {model} PROMPT`" if model else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def answers(samples: Sequence[Sample]) -> str:
    """Held-out prompts with the answers before and after."""
    if not samples:
        return ""
    rows = ((row.prompt, row.before, row.after, row.expected) for row in samples)
    return "## Held-out answers\n\n" + table(("prompt", "before", "after", "expected"), rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str | None]]) -> str:
    """Rows of texts, which show as they are; None is a dash."""
    lines = [head, ["---"] * len(head), *([cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(text: str | None) -> str:
    """A text in one line."""
    return "-" if text is None else escaped(" ".join(excerpt(text, CELL).split()))


def escaped(text: str) -> str:
    """A text without anything that Markdown takes for its own."""
    return SPECIAL.sub(r"\\\1", text)
