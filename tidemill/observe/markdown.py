"""Markdown for KFP and MLflow: links to the parts of a running run, and the report of a finished one."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlsplit

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tidemill.config.names import RUN_LABEL
from tidemill.config.run import RunConfig
from tidemill.errors import in_yaml
from tidemill.observe.report import CELL, Sample, Summary, facts, left_out, scores
from tidemill.observe.text import excerpt

DASHBOARD_PORT = 8265
TABLE_WIDTH = 100
DASHBOARD, STOP = "Ray dashboard", "End it"
"""Labels of rows that need a running cluster, and a running run."""


def links(config: RunConfig, kfp_run: str, experiment: str | None = None) -> str:
    """The page of the first step of a pipeline: where to follow the run, and its settings.

    Args:
        config: of the run.
        kfp_run: id of the KFP run, "" outside KFP.
        experiment: id in MLflow; None if MLflow has not been asked.
    """
    # A link that starts with # stays in the KFP UI that shows the page.
    here = kfp_run and config.cluster.provider == "kuberay"
    run = f"[{config.name}](#/runs/details/{kfp_run})" if here else config.name
    rows = dict(rows_of(config))
    if experiment is not None:
        rows["MLflow"] += f", [this run]({mlflow_page(config, experiment)})"
    places = "\n".join(f"- **{what}**: {where}" for what, where in rows.items())
    return f"# Run {run}\n\n{places}\n\n## Settings other than the defaults\n\n```\n{settings_table(config)}```\n"


def settings_table(config: RunConfig) -> str:
    """The settings that differ from the defaults, in a drawn table: KFP gives tables of Markdown no borders."""
    drawn = Table("setting", "value", box=box.SQUARE, show_lines=True)
    for key, value in leaves(config.model_dump(mode="json", exclude_defaults=True)):
        drawn.add_row(Text(key), Text(in_yaml(value), overflow="fold"))
    text = io.StringIO()
    Console(file=text, width=TABLE_WIDTH, color_system=None, emoji=False, markup=False).print(drawn)
    return text.getvalue()


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every setting."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def mlflow_page(config: RunConfig, experiment: str, run_id: str | None = None) -> str:
    """Address of the page of a run in MLflow, for a browser; without `run_id` the list of runs of this name."""
    base = (config.kubernetes.pages.get("mlflow") or forwarded(config.tracking.uri)[0]).rstrip("/")
    wanted = quote(f"attributes.run_name = '{config.name}'", safe="")
    # Without the type the pages of a browser that opens MLflow for the first time are those of GenAI.
    rest = f"?workflowType=machine_learning&searchFilter={wanted}" if run_id is None else f"/{run_id}"
    return f"{base}/#/experiments/{experiment}/runs{rest}"


def rows_of(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Label and place of every part of a run."""
    return cluster_rows(config) if config.cluster.provider == "kuberay" else local_rows(config)


def links_table(config: RunConfig) -> str:
    """The places as a table, the description of the run in MLflow."""
    table = "\n".join(f"| {what} | {where} |" for what, where in rows_of(config))
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
    local, command = forwarded(address)
    return f"`{command}`, then {local}" if command else local


def forwarded(address: str | None) -> tuple[str, str]:
    """(address for a browser outside the cluster, the command that it needs or "")."""
    parts = urlsplit(address or "")
    service, _, domain = (parts.hostname or "").partition(".")
    namespace, _, kind = domain.partition(".")
    if kind.partition(".")[0] != "svc" or parts.port is None:
        return str(address), ""
    command = f"kubectl -n {namespace} port-forward svc/{service} {parts.port}"
    return f"{parts.scheme}://127.0.0.1:{parts.port}", command


def local_rows(config: RunConfig) -> Iterator[tuple[str, str]]:
    yield "Folder", f"`{config.folder}`: events.jsonl, log.txt, summary.json"
    yield "MLflow", config.tracking.uri or f"`tidemill ui --output {config.output}`"
    yield "Registered model", f"`{config.registered_model}`, alias `{config.registry.alias}`"
    yield "Store", f"{config.store.endpoint}, bucket `{config.store.bucket}`, `runs/{config.name}/`"


SPECIAL = re.compile(r"([\\`*_\[\]<>|~&$#])")


def report(name: str, summary: Summary, mlflow: str | None = None) -> str:
    """The report of a finished run.

    Args:
        name: of the run.
        summary: of the run.
        mlflow: address of its page in MLflow.
    """
    model = summary.model_uri if summary.model_version is None else f"models:/{summary.model_version}"
    parts = [
        f"# {escaped(name)}",
        f"**{escaped(str(scores(summary)))}**",
        *(f"- {escaped(line)}" for line in left_out(summary)),
        table(("run", ""), [(fact.label, fact.text) for fact in facts(summary)]),
        f"[The run in MLflow]({mlflow})" if mlflow else "",
        answers(summary.samples),
        f"Ask the trained model: `tidemill generate {model} PROMPT`" if model else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def answers(samples: Sequence[Sample]) -> str:
    """Held-out prompts with the answers before and after training."""
    if not samples:
        return ""
    rows = ((row.prompt, row.expected, row.before, row.after) for row in samples)
    return "## Held-out answers\n\n" + table(("prompt", "expected", "before", "after"), rows)


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
