"""Runs on Kubernetes and parts of their RayJobs, for the tests of manifests.

As a program it writes the golden manifest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tidemill.config.reading import load_config
from tidemill.config.run import RunConfig
from tidemill.kuberay.manifest import as_yaml, ray_job
from tidemill.kuberay.run_status import Owner, owner_reference

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden/rayjob.yaml"
EXAMPLE = ROOT / "examples/addition.yaml"
APART = (
    "cluster.provider=kuberay",
    "sync.transport=object_store",
    "store.endpoint=http://minio.tidemill:9000",
    "tracking.uri=http://mlflow.tidemill:5000",
    "data.train=s3://tidemill/train.jsonl",
    "data.held_out=s3://tidemill/held_out.jsonl",
)
LARGE = (
    "trainer.ranks=16",
    "rollout.engines=2",
    "rollout.tensor_parallel_size=4",
    "kubernetes.max_engines=6",
    "kubernetes.gpu_type=NVIDIA-H100-80GB-HBM3",
    "kubernetes.node_selector={pool: training}",
    "kubernetes.tolerations=[{key: dedicated, operator: Equal, value: training, effect: NoSchedule}]",
    "kubernetes.trainer_priority_class=tidemill-trainer",
    "kubernetes.rollout_priority_class=tidemill-rollout",
    "kubernetes.image_pull_secrets=[registry]",
    "kubernetes.secrets=[hugging-face]",
    "kubernetes.env={NCCL_DEBUG: INFO}",
    "kubernetes.runtime_env={pip: [sympy]}",
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


def large_run() -> Tree:
    """The RayJob of a run that uses every Kubernetes setting; its other settings are replaced by `...`."""
    workflow = owner_reference("tidemill-post-training-x7k2p", "11111111-2222-3333-4444-555555555555")
    owner = Owner("66666666-7777-8888-9999-aaaaaaaaaaaa", workflow, "0" * 32)
    job = ray_job(on_kubernetes(*LARGE), 2, owner)
    next(e for e in container(templates(job)["head"])["env"] if e["name"] == "TIDEMILL_CONFIG")["value"] = "..."
    return job


if __name__ == "__main__":
    GOLDEN.write_text(as_yaml(large_run()), encoding="utf-8")
