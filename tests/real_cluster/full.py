"""The demo on a cluster, by hand: it trains in pods with vLLM, loses an engine and then its head, and leaves nothing.

    make test-cluster-full

Needs KUBECONFIG, the images of `make images minio-image` on the nodes, and DNS that resolves the names of services, as
in a pod of the cluster. Prints the output of the run and the faults, with the minutes since the start.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from mlflow import MlflowClient
from platform_rig import KEYS, ROOT, Platform, images_of_nodes, needed, new_platform

from tidemill.store.object_store import ObjectStore

NAME = "addition-full"
RUN = f"{NAME}-1"  # what `tidemill run` calls the first run of the name
IMAGE = os.environ.get("TIDEMILL_FULL_IMAGE", "localhost/tidemill-cpu:0.1.0")
EXAMPLE = ROOT / "examples" / "addition.yaml"
PROMPTS = {"train": "addition_train.jsonl", "held_out": "addition_held_out.jsonl"}
LOSE_ENGINE, LOSE_HEAD = 3, 8  # after these steps
LIMIT_S = 55 * 60
STEP = re.compile(r"\s+(\d+)/(\d+)\s")
OURS = "app.kubernetes.io/part-of=tidemill"
Say = Callable[[str], None]


def settings(platform: Platform, folder: Path) -> dict[str, Any]:
    """The demo's settings, in pods that fit a small node together."""
    tree: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    place = f"{platform.namespace}.svc.cluster.local"
    small = {"cpus": 0.3, "memory_gib": 6, "shared_memory_gib": 2}
    large = small | {"memory_gib": 8}  # a rank restores its state while it still holds the loaded weights
    tree |= {
        "name": NAME,
        "output": str(folder / "runs"),
        "store": {"endpoint": f"http://store.{place}:9000"},
        "tracking": {"uri": f"http://mlflow.{place}:5000"},
        "cluster": {"provider": "kuberay"},
        "sync": {"transport": "object_store"},
        "checkpoint": {"every": 3},
    }
    tree["data"] |= {key: f"s3://tidemill/prompts/{name}" for key, name in PROMPTS.items()}
    tree["rollout"] |= {"threads": 1, "start_timeout_s": 900.0}
    tree["trainer"] |= {"threads": 1}
    tree["kubernetes"] = {
        "namespace": platform.namespace,
        "image": IMAGE,
        "gpu_resource": None,
        "env": {"HF_HUB_OFFLINE": "1"},
        "trainer_priority_class": f"tidemill-trainer{platform.suffix}",
        "rollout_priority_class": f"tidemill-rollout{platform.suffix}",
        "head": {"cpus": 0.2, "memory_gib": 4},
        "trainer": large,
        "rollout": small,
        "start_timeout_s": 900,
        "keep_s": 0,
    }
    return tree


@dataclass
class Faults:
    """Pods that are deleted by force after certain steps.

    Attributes:
        platform: where.
        say: tells it.
        due: step, what is lost, and its label; the next one first.
    """

    platform: Platform
    say: Say
    due: list[tuple[int, str, str]] = field(
        default_factory=lambda: [
            (LOSE_ENGINE, "rollout pod", "ray.io/group=rollout"),
            (LOSE_HEAD, "head pod", "ray.io/node-type=head"),
        ]
    )

    def after(self, step: int) -> None:
        """Delete the pods that are due."""
        if not self.due or step < self.due[0][0]:
            return
        _, what, label = self.due.pop(0)
        chosen = f"{label},tidemill.dev/run={RUN}"
        self.platform.kubectl("delete", "pod", "-l", chosen, "--force", "--grace-period=0", "--wait=false")
        self.say(f"-- kubectl delete pod -l {label} --force: the {what} is gone")


def train(platform: Platform, folder: Path, say: Say) -> int:
    """Run the pipeline as the steps' service account; returns its exit status."""
    file = folder / "full.yaml"
    file.write_text(yaml.safe_dump(settings(platform, folder), sort_keys=False), encoding="utf-8")
    access, key = KEYS["tidemill-store"]
    env = os.environ | {
        "KUBECONFIG": str(platform.kubeconfig("tidemill-pipeline", folder)),
        "TIDEMILL_S3_ACCESS_KEY": access,
        "TIDEMILL_S3_SECRET_KEY": key,
        "COLUMNS": "120",
    }
    command = [sys.executable, "-m", "tidemill.cli.main", "run", str(file)]
    faults, started = Faults(platform, say), time.monotonic()
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            say(line.rstrip())
            if (step := STEP.match(line)) is not None:
                faults.after(int(step[1]))
            if time.monotonic() - started > LIMIT_S:
                process.terminate()
    assert not faults.due, f"the run ended before {faults.due} was lost"
    return process.returncode


def bring_prompts(store: ObjectStore) -> None:
    """Upload the demo's prompts to the store."""
    for name in PROMPTS.values():
        store.put_file(f"prompts/{name}", EXAMPLE.parent / name)


def check(platform: Platform, store: ObjectStore, tracking: str, folder: Path, say: Say) -> None:
    """Check the results of the run, and that nothing of it is left."""
    summary = json.loads((folder / "runs" / RUN / "summary.json").read_text(encoding="utf-8"))
    name, _, version = summary["model_version"].partition("/")
    assert MlflowClient(tracking).get_model_version_by_alias(name, "candidate").version == version
    say(f"held-out score {summary['held_out_before']:.3f} -> {summary['held_out_after']:.3f}")
    say(f"model version {name}/{version}, alias candidate")
    attempts = {item.key.split("/")[3] for item in store.list(f"runs/{RUN}/attempts/")}
    assert len(attempts) >= 2, attempts
    say(f"attempts: {', '.join(sorted(attempts))}")
    for kind in ("rayjobs", "rayclusters", "pods", "jobs", "services"):
        left = platform.kubectl("get", kind, "-l", OURS, "-o", "name").stdout.split()
        assert left == [], left
    assert not store.exists(f"runs/{RUN}/lease")
    say("left in the cluster: no RayJob, no RayCluster, no pod, no lease")


def main() -> None:
    """Run the whole test; fails with a traceback."""
    missing = {IMAGE, *needed("test")} - images_of_nodes()
    if missing:
        sys.exit(f"the nodes lack {', '.join(sorted(missing))}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the namespace is deleted in any case
    started = time.monotonic()

    def say(text: str) -> None:
        seconds = int(time.monotonic() - started)
        print(f"{seconds // 60:4d}:{seconds % 60:02d} | {text}", flush=True)

    platform = new_platform()
    place = f"{platform.namespace}.svc.cluster.local"
    try:
        with tempfile.TemporaryDirectory(prefix="tidemill-full-") as folder:
            platform.apply("test")
            platform.wait("deployment/minio")
            platform.wait("job/store-setup", "condition=complete")
            platform.wait("deployment/mlflow")
            say("k8s/overlays/test is up: MinIO, its users, MLflow")
            store = ObjectStore.connect(f"http://store.{place}:9000", "tidemill", *KEYS["tidemill-store"])
            bring_prompts(store)
            status = train(platform, Path(folder), say)
            assert status == 0, f"the pipeline ended with status {status}"
            check(platform, store, f"http://mlflow.{place}:5000", Path(folder), say)
    finally:
        platform.remove()


if __name__ == "__main__":
    main()
