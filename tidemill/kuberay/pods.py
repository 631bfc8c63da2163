"""The pods of a run: who they run as, what they may write to, what they know and what they are given.

All of them pass the restricted pod security standard. None restarts in place: what fails is replaced by a new pod, so
that nothing of it is left in memory or on disk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from tidemill.config.kubernetes import HeadPod, RolloutPod, TrainerPod
from tidemill.config.names import API_SERVER_LABEL
from tidemill.config.run import RunConfig
from tidemill.kuberay.kinds import (
    Container,
    EmptyDir,
    EnvFrom,
    EnvVar,
    Exec,
    Hook,
    Labels,
    Lifecycle,
    Metadata,
    Named,
    PodSecurityContext,
    PodSpec,
    PodTemplate,
    Port,
    Resources,
    SecretKey,
    SecurityContext,
    ValueFrom,
    Volume,
    VolumeMount,
)
from tidemill.kuberay.submitter import COMMAND, JOB

USER = 1000
WORK = "/work"
"""The folder of a pod that its processes write to."""
RUNS = f"{WORK}/runs"
"""The settings' `output` in a pod."""
GPU_PRODUCT = "nvidia.com/gpu.product"
SAFE_TO_EVICT = "cluster-autoscaler.kubernetes.io/safe-to-evict"
STORE_KEYS = {"TIDEMILL_S3_ACCESS_KEY": "access_key", "TIDEMILL_S3_SECRET_KEY": "secret_key"}
"""Environment variables of the object store's keys, and where they stand in `kubernetes.store_secret`."""
GRACE_S = 120
"""Seconds that head and trainer pods get to end; a step and a checkpoint that take longer are lost."""
ENVIRONMENT = {
    "HF_HOME": f"{WORK}/huggingface",
    "HOME": WORK,  # what libraries compile or download goes below it
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray would hold a pod that is told to end for 30 s, waiting for what its actors do; see `farewell.py`.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    # KubeRay has Ray stop the job of a RayJob that is deleted: SIGTERM, and without this SIGKILL 3 s later.
    "RAY_JOB_STOP_WAIT_TIME_S": str(GRACE_S),
    "RAY_USAGE_STATS_ENABLED": "0",
    # What a killed engine leaves behind in its pod must not keep the GPU from the next one.
    "RAY_process_group_cleanup_enabled": "true",
    "TIDEMILL_CACHE": f"{WORK}/cache",
    "TIDEMILL_SCRATCH": RUNS,
}
TEMPORARY = VolumeMount(name="tmp", mount_path="/tmp")
WORKING = VolumeMount(name="work", mount_path=WORK)
SHARED_MEMORY = VolumeMount(name="shared-memory", mount_path="/dev/shm")
TOKEN = VolumeMount(name="token", mount_path="/var/run/secrets/kubernetes.io/serviceaccount", read_only=True)
TOKEN_SECONDS = 3600
FAREWELL = ["python3", "-m", "tidemill.kuberay.pre_stop"]
HEAD_SHARED_MEMORY_GIB = 1
SUBMITTER = Resources(requests={"cpu": "50m", "memory": "256Mi"}, limits={"memory": "256Mi"})
PORTS = [Port(name="gcs-server", container_port=6379), Port(name="dashboard", container_port=8265)]


def head_template(config: RunConfig, labels: Labels, extra: Mapping[str, str], *, scales: bool) -> PodTemplate:
    """The head: Ray's services and the schedule of the run, no actor.

    Args:
        config: of the run.
        labels: of every pod.
        extra: environment variables that only the head has.
        scales: whether the autoscaler runs beside it, which alone sees a token.
    """
    container = ray_container(config, config.kubernetes.head, 0, extra).model_copy(update={"ports": PORTS})
    volumes = [*folders(HEAD_SHARED_MEMORY_GIB), *([token_volume()] if scales else [])]
    spec = pod(config, container, volumes, config.kubernetes.trainer_priority_class)
    spec = spec if scales else sharing(spec)  # a driver in one namespace with the autoscaler could read its token
    seen = labels | ({API_SERVER_LABEL: "true"} if scales else {})
    return PodTemplate(metadata=lasting(seen), spec=unhurried(spec))


def trainer_template(config: RunConfig, labels: Labels, ranks: int) -> PodTemplate:
    """A pod of `ranks` trainer ranks, one GPU each."""
    size = config.kubernetes.trainer
    container = ray_container(config, size, ranks)
    spec = worker(config, container, size.shared_memory_gib, config.kubernetes.trainer_priority_class)
    return PodTemplate(metadata=lasting(labels), spec=unhurried(spec))


def rollout_template(config: RunConfig, labels: Labels) -> PodTemplate:
    """A pod of one engine."""
    size = config.kubernetes.rollout
    container = ray_container(config, size, config.rollout.tensor_parallel_size)
    spec = worker(config, container, size.shared_memory_gib, config.kubernetes.rollout_priority_class)
    return PodTemplate(metadata=Metadata(labels=labels), spec=spec)


def submitter_template(config: RunConfig, labels: Labels, entrypoint: str) -> PodTemplate:
    """The pod that hands the job to Ray; the run fails with it."""
    job = json.dumps({"entrypoint": entrypoint, "runtime_env": config.kubernetes.runtime_env})
    container = Container(
        name="ray-job-submitter",
        image=config.kubernetes.image,
        command=COMMAND,
        env=variables({JOB: job}),
        resources=SUBMITTER,
        security_context=SecurityContext(read_only_root_filesystem=True),
        volume_mounts=[TEMPORARY, WORKING],
    )
    spec = pod(config, container, folders(None), config.kubernetes.trainer_priority_class)
    return PodTemplate(metadata=lasting(labels), spec=spec)


def lasting(labels: Labels) -> Metadata:
    """Marks of a pod that a run cannot lose: the autoscaler of the Kubernetes cluster shall not move it."""
    return Metadata(labels=labels, annotations={SAFE_TO_EVICT: "false"})


def pod(config: RunConfig, container: Container, volumes: list[Volume], priority_class: str | None) -> PodSpec:
    """A pod of one container."""
    return PodSpec(
        service_account_name=config.kubernetes.service_account,
        security_context=PodSecurityContext(run_as_user=USER, run_as_group=USER, fs_group=USER),
        image_pull_secrets=[Named(name=name) for name in config.kubernetes.image_pull_secrets] or None,
        priority_class_name=priority_class,
        containers=[container],
        volumes=volumes,
    )


def worker(config: RunConfig, container: Container, shared_memory_gib: int, priority_class: str | None) -> PodSpec:
    """A pod on the nodes that the run wants."""
    spec = pod(config, container, folders(shared_memory_gib), priority_class)
    where = {"node_selector": node_labels(config) or None, "tolerations": tolerations(config) or None}
    return sharing(spec.model_copy(update=where))


def sharing(spec: PodSpec) -> PodSpec:
    """A pod whose containers end as soon as they are told to, also while they start.

    The first process of a namespace hears SIGTERM only if it listens, and neither the shell in which KubeRay has a
    worker wait for the head nor Ray on its way up does: they would hold the pod, and its GPUs, for all of its grace
    period. In a namespace of the whole pod they are not the first.
    """
    return spec.model_copy(update={"share_process_namespace": True})


def unhurried(spec: PodSpec) -> PodSpec:
    """A pod that gets time for a checkpoint before it ends."""
    hook = Lifecycle(pre_stop=Hook(exec_=Exec(command=FAREWELL)))
    containers = [container.model_copy(update={"lifecycle": hook}) for container in spec.containers]
    return spec.model_copy(update={"containers": containers, "termination_grace_period_seconds": GRACE_S})


def node_labels(config: RunConfig) -> Labels:
    """Labels that a node of trainer and rollout pods must have."""
    product = config.kubernetes.gpu_type
    return ({} if product is None else {GPU_PRODUCT: product}) | config.kubernetes.node_selector


def tolerations(config: RunConfig) -> list[dict[str, str | int]]:
    """Taints that trainer and rollout pods tolerate; nodes with GPUs are often tainted with the resource's name."""
    resource = config.kubernetes.gpu_resource
    usual: dict[str, str | int] = {"key": resource or "", "operator": "Exists", "effect": "NoSchedule"}
    return [*([usual] if resource else []), *config.kubernetes.tolerations]


def ray_container(
    config: RunConfig, size: HeadPod | TrainerPod | RolloutPod, gpus: int, extra: Mapping[str, str] | None = None
) -> Container:
    """The container that KubeRay starts Ray in."""
    return Container(
        name="ray",
        image=config.kubernetes.image,
        env=[*variables(ENVIRONMENT | config.kubernetes.env | dict(extra or {})), *store_keys(config)],
        env_from=[EnvFrom(secret_ref=Named(name=name)) for name in config.kubernetes.secrets] or None,
        resources=resources(config, size, gpus),
        volume_mounts=[TEMPORARY, WORKING, SHARED_MEMORY],
    )


def resources(config: RunConfig, size: HeadPod | TrainerPod | RolloutPod, gpus: int) -> Resources:
    """Memory and GPUs as they are asked for and no more; cores are promised, and idle ones may be used beyond that."""
    resource = config.kubernetes.gpu_resource
    limits = {"memory": f"{size.memory_gib}Gi"} | ({resource: str(gpus)} if resource and gpus else {})
    return Resources(requests={"cpu": f"{size.cpus:g}"} | limits, limits=limits)


def variables(values: Mapping[str, str]) -> list[EnvVar]:
    """Environment variables of just these values; Kubernetes would replace `$(NAME)`, and writes `$` for `$$`."""
    return [EnvVar(name=name, value=value.replace("$", "$$")) for name, value in values.items()]


def store_keys(config: RunConfig) -> list[EnvVar]:
    """The object store's keys, from their Secret."""
    secret = config.kubernetes.store_secret
    return [
        EnvVar(name=name, value_from=ValueFrom(secret_key_ref=SecretKey(name=secret, key=key)))
        for name, key in STORE_KEYS.items()
    ]


def folders(shared_memory_gib: int | None) -> list[Volume]:
    """What a pod may write to; all of it goes with the pod."""
    on_disk = [Volume(name=mount.name, empty_dir=EmptyDir()) for mount in (TEMPORARY, WORKING)]
    if shared_memory_gib is None:
        return on_disk
    memory = EmptyDir(medium="Memory", size_limit=f"{shared_memory_gib}Gi")
    return [*on_disk, Volume(name=SHARED_MEMORY.name, empty_dir=memory)]


def token_volume() -> Volume:
    """A short-lived token of the service account, for the one container that talks to Kubernetes."""
    token = {"serviceAccountToken": {"path": "token", "expirationSeconds": TOKEN_SECONDS}}
    authority = {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}}
    return Volume(name=TOKEN.name, projected={"sources": [token, authority]})
