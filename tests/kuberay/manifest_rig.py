"""Runs for Kubernetes and the parts of their RayJobs, as the tests of manifests need them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tidemill.config import RunConfig
from tidemill.run_file import load_config

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/addition.yaml"
APART = (
    "cluster.provider=kuberay",
    "sync.transport=object_store",
    "store.endpoint=http://minio.tidemill:9000",
    "tracking.uri=http://mlflow.tidemill:5000",
    "data.train=s3://tidemill/train.jsonl",
    "data.held_out=s3://tidemill/held_out.jsonl",
)
Tree = dict[str, Any]


def on_kubernetes(*overrides: str) -> RunConfig:
    """The demo in pods."""
    return load_config(EXAMPLE, [*APART, *overrides])


def cluster(job: Tree) -> Tree:
    return job["spec"]["rayClusterSpec"]


def group(job: Tree, name: str) -> Tree:
    return next(group for group in cluster(job)["workerGroupSpecs"] if group["groupName"] == name)


def templates(job: Tree) -> dict[str, Tree]:
    """Every pod template by the role of its pods."""
    groups = {group["groupName"]: group["template"] for group in cluster(job)["workerGroupSpecs"]}
    head = cluster(job)["headGroupSpec"]["template"]
    return {"submitter": job["spec"]["submitterPodTemplate"], "head": head, **groups}


def container(template: Tree) -> Tree:
    return template["spec"]["containers"][0]
