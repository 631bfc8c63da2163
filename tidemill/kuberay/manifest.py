"""The RayJob of an attempt at a run: a head without actors, a group of trainer pods and a group of rollout pods.

KubeRay never retries a RayJob, because a retry has to continue from a checkpoint, under the next attempt number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from tidemill.config.kubernetes import RANKS_PER_POD, RolloutPod, TrainerPod
from tidemill.config.names import (
    ATTEMPT_LABEL,
    KFP_RUN_LABEL,
    PART_OF,
    ROLLOUT_RESOURCE,
    RUN_LABEL,
    SERVICE_RESOURCE,
    TIDEMILL,
    TRAINER_RESOURCE,
    job_name,
)
from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError
from tidemill.kuberay.pods import (
    RESTRICTED,
    RUNS,
    STORE_KEYS,
    TOKEN,
    Labels,
    Manifest,
    head_template,
    node_labels,
    present,
    rollout_template,
    submitter_template,
    trainer_template,
)
from tidemill.kuberay.run_status import KFP_RUN, MLFLOW_RUN, NOBODY, Owner

RAY_VERSION = "2.60.0"
"""Version of Ray in the image."""
ENTRYPOINT = "python3 -m tidemill.driver.job"
SERVICES = 1000
"""Number of services, such as queue and rollouter, that fit into a trainer pod: more than any run has."""
WATCHER_FIRST_S = 60
"""KubeRay's deadline comes this much after the watcher's, because the watcher reports what the pods wait for."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
IDLE_SECONDS = 60
"""An elastic rollout group releases an engine's pod after this idle time."""
AUTOSCALER_RESOURCES = {"requests": {"cpu": "200m", "memory": "1Gi"}, "limits": {"memory": "1Gi"}}
GIB = 2**30
HEAD_OBJECT_STORE = GIB // 4
OBJECT_STORE_SHARE = 4
"""Ray's object store, which holds groups, gets this part of a pod's shared memory; weights need the rest."""
MAX_VALUE_BYTES = 120_000
"""Size of an environment variable: Linux allows 128 KiB with its name."""


def ray_job(config: RunConfig, attempt: int, owner: Owner = NOBODY) -> Manifest:
    """The RayJob of an attempt.

    Args:
        config: settings of the run; `output` becomes a folder of the pod.
        attempt: counted from 1.
        owner: pipeline run, as a label and as variables of the head; its MLflow run is continued.

    Raises:
        ConfigError: the settings are too long for an environment variable.
    """
    labels = {PART_OF: TIDEMILL, RUN_LABEL: config.name, ATTEMPT_LABEL: str(attempt)}
    labels |= {} if owner.kfp_run is None else {KFP_RUN_LABEL: owner.kfp_run}
    ids = {MLFLOW_RUN: owner.mlflow_run, KFP_RUN: owner.kfp_run}
    variables = {"TIDEMILL_ATTEMPT": str(attempt), "TIDEMILL_CONFIG": settings_in_pod(config), **present(ids)}
    queue = config.kubernetes.queue
    metadata = {
        "name": job_name(config.name, attempt),
        "namespace": config.kubernetes.namespace,
        "labels": labels | ({} if queue is None else {QUEUE_LABEL: queue}),
        "ownerReferences": None if owner.reference is None else [dict(owner.reference)],
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": present(metadata),
        "spec": job_spec(config, labels, variables),
    }


def settings_in_pod(config: RunConfig) -> str:
    text = config.model_copy(update={"output": Path(RUNS)}).to_yaml()
    if len(text.encode()) > MAX_VALUE_BYTES:
        fix = "Put long values, such as options, into files of the image."
        raise ConfigError("config", f"{len(text.encode())} bytes", f"up to {MAX_VALUE_BYTES} bytes", fix)
    return text


def job_spec(config: RunConfig, labels: Labels, variables: Mapping[str, str]) -> Manifest:
    settings = config.kubernetes
    return present(
        {
            "entrypoint": ENTRYPOINT,
            "runtimeEnvYAML": yaml.safe_dump(settings.runtime_env) if settings.runtime_env else None,
            "submissionMode": "K8sJobMode",
            "submitterConfig": {"backoffLimit": 0},
            "submitterPodTemplate": submitter_template(config, labels, ENTRYPOINT),
            "backoffLimit": 0,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": settings.keep_s,
            "activeDeadlineSeconds": math.ceil(settings.max_hours * 3600),
            "preRunningDeadlineSeconds": settings.start_timeout_s + WATCHER_FIRST_S,
            "suspend": None if settings.queue is None else True,
            "rayClusterSpec": cluster_spec(config, labels, variables),
        }
    )


def cluster_spec(config: RunConfig, labels: Labels, variables: Mapping[str, str]) -> Manifest:
    """The pods of the cluster; the rollout group is elastic if `max_engines` allows more than `rollout.engines`."""
    most = config.kubernetes.max_engines
    scales = most is not None and most > config.rollout.engines
    autoscaler = {
        "version": "v2",
        "idleTimeoutSeconds": IDLE_SECONDS,
        "imagePullPolicy": "IfNotPresent",
        "resources": AUTOSCALER_RESOURCES,
        "securityContext": RESTRICTED,
        "volumeMounts": [TOKEN],
    }
    return {
        "rayVersion": RAY_VERSION,
        "authOptions": {"mode": "token"},
        **({"enableInTreeAutoscaling": True, "autoscalerOptions": autoscaler} if scales else {}),
        "headGroupSpec": {
            "rayStartParams": {
                "num-cpus": "0",
                "num-gpus": "0",
                "dashboard-host": "0.0.0.0",
                "object-store-memory": str(HEAD_OBJECT_STORE),
            },
            "template": head_template(config, labels, variables, scales=scales),
        },
        "workerGroupSpecs": [trainer_group(config, labels), rollout_group(config, labels)],
    }


def trainer_group(config: RunConfig, labels: Labels) -> Manifest:
    ranks = min(config.trainer.ranks, RANKS_PER_POD)
    pods = max(1, config.trainer.ranks // RANKS_PER_POD)
    return {
        "groupName": "trainer",
        "replicas": pods,
        "minReplicas": pods,
        "maxReplicas": pods,
        "rayStartParams": start_params(
            config, config.kubernetes.trainer, ranks, {TRAINER_RESOURCE: ranks, SERVICE_RESOURCE: SERVICES}
        ),
        "template": trainer_template(config, labels, ranks),
    }


def rollout_group(config: RunConfig, labels: Labels) -> Manifest:
    engines, gpus = config.rollout.engines, config.rollout.tensor_parallel_size
    return {
        "groupName": "rollout",
        "replicas": engines,
        "minReplicas": engines,
        "maxReplicas": config.kubernetes.max_engines or engines,
        "rayStartParams": start_params(config, config.kubernetes.rollout, gpus, {ROLLOUT_RESOURCE: 1}),
        "template": rollout_template(config, labels),
    }


def start_params(config: RunConfig, size: TrainerPod | RolloutPod, gpus: int, resources: Mapping[str, int]) -> Labels:
    """Options of `ray start` in a worker; the quotes are for the shell that KubeRay starts Ray with."""
    return {
        "num-cpus": str(math.ceil(size.cpus)),
        "num-gpus": str(gpus if config.kubernetes.gpu_resource else 0),
        "object-store-memory": str(size.shared_memory_gib * GIB // OBJECT_STORE_SHARE),
        "resources": f"'{json.dumps(resources)}'",
    }


class Dumper(yaml.SafeDumper):
    """Writes text of several lines, such as the settings, as a block, and no anchors."""

    def ignore_aliases(self, data: object) -> bool:
        del data
        return True


def represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


Dumper.add_representer(str, represent_text)


def as_yaml(manifest: Manifest) -> str:
    return yaml.dump(manifest, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def manifests(config: RunConfig, attempt: int = 1) -> str:
    """YAML of everything that the run creates in the cluster, after a comment on what must exist already.

    The API server validates it: `kubectl apply --dry-run=server -f -`.

    Raises:
        ConfigError: the run is not for Kubernetes.
    """
    if config.cluster.provider != "kuberay":
        fix = "Set cluster.provider=kuberay; other runs have no manifests."
        raise ConfigError("cluster.provider", config.cluster.provider, "kuberay", fix)
    return "".join(f"# {line}\n" for line in requirements(config)) + as_yaml(ray_job(config, attempt))


def requirements(config: RunConfig) -> Iterator[str]:
    settings = config.kubernetes
    yield f"Namespace {settings.namespace} must have:"
    yield f"- service account {settings.service_account}"
    yield f"- secret {settings.store_secret} with {' and '.join(STORE_KEYS.values())}"
    for name in settings.secrets:
        yield f"- secret {name}, whose keys become environment variables"
    for name in settings.image_pull_secrets:
        yield f"- secret {name} to pull the image with"
    if settings.queue is not None:
        yield f"- Kueue's LocalQueue {settings.queue}"
    classes = (settings.trainer_priority_class, settings.rollout_priority_class)
    for name in sorted({name for name in classes if name is not None}):
        yield f"- priority class {name} (of the whole cluster)"
    if labels := node_labels(config):
        yield f"- nodes with {', '.join(f'{key}={value}' for key, value in labels.items())}"
