"""Markdown for KFP and MLflow: links to the parts of a running run, and the report of a finished one."""

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
"""Labels of rows that need a running cluster, and a running run."""


def links(config: RunConfig, kfp_run: str) -> str:
    """The page of the first step of a pipeline: where to follow the run.

    Args:
        config: of the run.
        kfp_run: id of the KFP run, "" outside KFP.
    """
    # A link that starts with # stays in the KFP UI that shows the page.
    here = kfp_run and config.cluster.provider == "kuberay"
    run = f"[{config.name}](#/runs/details/{kfp_run})" if here else config.name
    return f"# Run {run}\n\n{links_table(config)}"


def links_table(config: RunConfig) -> str:
    """The table of the page, which is also the description of the run in MLflow."""
    rows = cluster_rows(config) if config.cluster.provider == "kuberay" else local_rows(config)
    table = "\n".join(f"| {what} | {where} |" for what, where in rows)
    return f"| | |\n|---|---|\n{table}\n"


def cluster_rows(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Label and place on Kubernetes; an address inside the cluster comes with its port-forward."""
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
    """How a browser outside the cluster opens an address; only that of a service needs a port-forward."""
    parts = urlsplit(address or "")
    service, _, domain = (parts.hostname or "").partition(".")
    namespace, _, kind = domain.partition(".")
    if kind.partition(".")[0] != "svc" or parts.port is None:
        return str(address)
    local = f"{parts.scheme}://127.0.0.1:{parts.port}"
    return f"`kubectl -n {namespace} port-forward svc/{service} {parts.port}`, then {local}"


def local_rows(config: RunConfig) -> Iterator[tuple[str, str]]:
    yield "Folder", f"`{config.folder}`: events.jsonl, log.txt, summary.json"
    yield "MLflow", config.tracking.uri or f"`tidemill ui --output {config.output}`"
    yield "Registered model", f"`{config.registered_model}`, alias `{config.registry.alias}`"
    yield "Store", f"{config.store.endpoint}, bucket `{config.store.bucket}`, `runs/{config.name}/`"


SPECIAL = re.compile(r"([\\`*_\[\]<>|~&$#])")


def report(name: str, summary: Summary) -> str:
    """The report of a finished run."""
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
    """Held-out prompts with the answers before and after training."""
    if not samples:
        return ""
    rows = ((row.prompt, row.before, row.after, row.expected) for row in samples)
    return "## Held-out answers\n\n" + table(("prompt", "before", "after", "expected"), rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str | None]]) -> str:
    """A table of literal texts; None becomes a dash."""
    lines = [head, ["---"] * len(head), *([cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(text: str | None) -> str:
    """A literal text in one line."""
    return "-" if text is None else escaped(" ".join(excerpt(text, CELL).split()))


def escaped(text: str) -> str:
    """The text with the special characters of Markdown escaped."""
    return SPECIAL.sub(r"\\\1", text)
