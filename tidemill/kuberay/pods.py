"""The pod templates of a run: identity, files, settings and resources.

All pods pass the restricted pod security standard. None restarts in place: a new pod replaces one that fails, so that
no memory or file of it remains.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tidemill.config.kubernetes import HeadPod, RolloutPod, TrainerPod
from tidemill.config.names import API_SERVER_LABEL
from tidemill.config.run import RunConfig
from tidemill.kuberay import pre_stop, submitter

Manifest = dict[str, Any]
"""A part of a Kubernetes object, as the API server takes it."""
Labels = dict[str, str]

USER = 1000
WORK = "/work"
"""The folder of a pod that its processes write to."""
RUNS = f"{WORK}/runs"
"""`output` of the settings in a pod."""
GPU_PRODUCT = "nvidia.com/gpu.product"
SAFE_TO_EVICT = "cluster-autoscaler.kubernetes.io/safe-to-evict"
STORE_KEYS = {"TIDEMILL_S3_ACCESS_KEY": "access_key", "TIDEMILL_S3_SECRET_KEY": "secret_key"}
"""Environment variables of the object store's keys, and their keys in `kubernetes.store_secret`."""
ENVIRONMENT = {
    "HF_HOME": f"{WORK}/huggingface",
    "HOME": WORK,  # libraries write compiled and downloaded files below it
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Without this Ray delays the end of a pod by 30 s to drain its actors; `pre_stop` has already waited for them.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    # When a RayJob is deleted, KubeRay tells Ray to stop its job: SIGTERM, and without this SIGKILL 3 s later.
    "RAY_JOB_STOP_WAIT_TIME_S": str(pre_stop.GRACE_S),
    "RAY_USAGE_STATS_ENABLED": "0",
    # Processes that a killed engine leaves in its pod must not keep the GPU from the next engine.
    "RAY_process_group_cleanup_enabled": "true",
    "TIDEMILL_CACHE": f"{WORK}/cache",
    "TIDEMILL_SCRATCH": RUNS,
}
RESTRICTED = {"allowPrivilegeEscalation": False, "runAsNonRoot": True, "capabilities": {"drop": ["ALL"]}}
"""Security context of a container under the restricted standard."""
TEMPORARY = {"name": "tmp", "mountPath": "/tmp"}
WORKING = {"name": "work", "mountPath": WORK}
SHARED_MEMORY = {"name": "shared-memory", "mountPath": "/dev/shm"}
TOKEN = {"name": "token", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount", "readOnly": True}
TOKEN_SECONDS = 3600
HEAD_SHARED_MEMORY_GIB = 1
SUBMITTER_RESOURCES = {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "256Mi"}}
PORTS = [{"name": "gcs-server", "containerPort": 6379}, {"name": "dashboard", "containerPort": 8265}]
CHECKPOINT_FIRST = {"preStop": {"exec": {"command": pre_stop.COMMAND}}}
"""Lifecycle of a container that gets time for a checkpoint before it ends."""


def head_template(config: RunConfig, labels: Labels, extra: Mapping[str, str], *, scales: bool) -> Manifest:
    """The head pod: Ray's services and the driver, no actor."""
    container = ray_container(config, config.kubernetes.head, 0, extra, ports=PORTS, lifecycle=CHECKPOINT_FIRST)
    volumes = [*folders(HEAD_SHARED_MEMORY_GIB), *([token_volume()] if scales else [])]
    fields: Manifest = {"terminationGracePeriodSeconds": pre_stop.GRACE_S}
    if not scales:  # in one process namespace with the autoscaler the driver could read the autoscaler's token
        fields["shareProcessNamespace"] = True
    spec = pod_spec(config, container, volumes, config.kubernetes.trainer_priority_class, fields)
    return template(labels | ({API_SERVER_LABEL: "true"} if scales else {}), spec, evictable=False)


def trainer_template(config: RunConfig, labels: Labels, ranks: int) -> Manifest:
    size = config.kubernetes.trainer
    container = ray_container(config, size, ranks, lifecycle=CHECKPOINT_FIRST)
    fields = {"terminationGracePeriodSeconds": pre_stop.GRACE_S, **worker_fields(config)}
    volumes = folders(size.shared_memory_gib)
    spec = pod_spec(config, container, volumes, config.kubernetes.trainer_priority_class, fields)
    return template(labels, spec, evictable=False)


def rollout_template(config: RunConfig, labels: Labels) -> Manifest:
    size = config.kubernetes.rollout
    container = ray_container(config, size, config.rollout.tensor_parallel_size)
    volumes = folders(size.shared_memory_gib)
    spec = pod_spec(config, container, volumes, config.kubernetes.rollout_priority_class, worker_fields(config))
    return template(labels, spec, evictable=True)


def submitter_template(config: RunConfig, labels: Labels, entrypoint: str) -> Manifest:
    """The pod that submits the job to Ray; the attempt fails if this pod fails."""
    job = json.dumps({"entrypoint": entrypoint, "runtime_env": config.kubernetes.runtime_env})
    container = {
        "name": "ray-job-submitter",
        "image": config.kubernetes.image,
        "imagePullPolicy": "IfNotPresent",
        "command": submitter.COMMAND,
        "env": variables({submitter.JOB: job}),
        "resources": SUBMITTER_RESOURCES,
        "securityContext": RESTRICTED | {"readOnlyRootFilesystem": True},
        "volumeMounts": [TEMPORARY, WORKING],
    }
    spec = pod_spec(config, container, folders(None), config.kubernetes.trainer_priority_class, {})
    return template(labels, spec, evictable=False)


def template(labels: Labels, spec: Manifest, *, evictable: bool) -> Manifest:
    """A pod template; the cluster autoscaler of Kubernetes must not move pods that a run cannot lose."""
    annotations = {} if evictable else {"annotations": {SAFE_TO_EVICT: "false"}}
    return {"metadata": {"labels": labels, **annotations}, "spec": spec}


def pod_spec(
    config: RunConfig, container: Manifest, volumes: list[Manifest], priority_class: str | None, fields: Manifest
) -> Manifest:
    return present(
        {
            "serviceAccountName": config.kubernetes.service_account,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "restartPolicy": "Never",
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "imagePullSecrets": [{"name": name} for name in config.kubernetes.image_pull_secrets] or None,
            "priorityClassName": priority_class,
            **fields,
            "containers": [container],
            "volumes": volumes,
        }
    )


def worker_fields(config: RunConfig) -> Manifest:
    """Fields of trainer and rollout pods: their nodes, and one process namespace for the pod.

    The first process of a process namespace ignores SIGTERM unless it has a handler. Neither the shell in which KubeRay
    makes a worker wait for the head nor a starting Ray has one: they would hold the pod and its GPUs for the whole
    grace period. In the process namespace of the pod they are not the first process.
    """
    return {
        "shareProcessNamespace": True,
        "nodeSelector": node_labels(config) or None,
        "tolerations": tolerations(config) or None,
    }


def node_labels(config: RunConfig) -> Labels:
    product = config.kubernetes.gpu_type
    return ({} if product is None else {GPU_PRODUCT: product}) | config.kubernetes.node_selector


def tolerations(config: RunConfig) -> list[dict[str, str | int]]:
    """Taints that trainer and rollout pods tolerate; nodes with GPUs often have a taint named like the resource."""
    resource = config.kubernetes.gpu_resource
    usual: dict[str, str | int] = {"key": resource or "", "operator": "Exists", "effect": "NoSchedule"}
    return [*([usual] if resource else []), *config.kubernetes.tolerations]


def ray_container(
    config: RunConfig,
    size: HeadPod | TrainerPod | RolloutPod,
    gpus: int,
    extra: Mapping[str, str] | None = None,
    **fields: object,
) -> Manifest:
    return present(
        {
            "name": "ray",
            "image": config.kubernetes.image,
            "imagePullPolicy": "IfNotPresent",
            "env": [*variables(ENVIRONMENT | config.kubernetes.env | dict(extra or {})), *store_keys(config)],
            "envFrom": [{"secretRef": {"name": name}} for name in config.kubernetes.secrets] or None,
            "resources": resources(config, size, gpus),
            "securityContext": RESTRICTED,
            **fields,
            "volumeMounts": [TEMPORARY, WORKING, SHARED_MEMORY],
        }
    )


def resources(config: RunConfig, size: HeadPod | TrainerPod | RolloutPod, gpus: int) -> Manifest:
    """Requests equal to limits for memory and GPUs; cores are requested only, so that a pod may use idle ones too."""
    resource = config.kubernetes.gpu_resource
    limits = {"memory": f"{size.memory_gib}Gi"} | ({resource: str(gpus)} if resource and gpus else {})
    return {"requests": {"cpu": f"{size.cpus:g}"} | limits, "limits": limits}


def variables(values: Mapping[str, str]) -> list[Manifest]:
    """Environment variables with exactly these values: Kubernetes replaces `$(NAME)`, and reads `$$` as `$`."""
    return [{"name": name, "value": value.replace("$", "$$")} for name, value in values.items()]


def store_keys(config: RunConfig) -> list[Manifest]:
    secret = config.kubernetes.store_secret
    return [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}} for name, key in STORE_KEYS.items()
    ]


def folders(shared_memory_gib: int | None) -> list[Manifest]:
    """Volumes that a pod writes to; they are deleted with the pod."""
    on_disk: list[Manifest] = [{"name": mount["name"], "emptyDir": {}} for mount in (TEMPORARY, WORKING)]
    if shared_memory_gib is None:
        return on_disk
    memory = {"medium": "Memory", "sizeLimit": f"{shared_memory_gib}Gi"}
    return [*on_disk, {"name": SHARED_MEMORY["name"], "emptyDir": memory}]


def token_volume() -> Manifest:
    """A short-lived token of the service account, for the only container that talks to the API server."""
    token = {"serviceAccountToken": {"path": "token", "expirationSeconds": TOKEN_SECONDS}}
    authority = {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}}
    return {"name": TOKEN["name"], "projected": {"sources": [token, authority]}}


def present(fields: Mapping[str, Any]) -> Manifest:
    """The fields that are not None; for others the default of the API server holds."""
    return {name: value for name, value in fields.items() if value is not None}
