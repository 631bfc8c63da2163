"""Where a run's Ray cluster comes from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tidemill.config.section import (
    DNS_LABEL,
    LABEL,
    RESOURCE,
    TAGGED_IMAGE,
    VARIABLE,
    Cores,
    Count,
    ObjectName,
    Positive,
    Section,
)

RANKS_PER_POD = 8
"""Largest number of trainer ranks in one pod, as of GPUs in a machine."""


class ClusterConfig(Section):
    """Where the run's Ray cluster comes from."""

    provider: Literal["local", "existing", "kuberay"] = "local"
    """`local` starts Ray on this machine for the run; `existing` joins the cluster at RAY_ADDRESS; `kuberay` has the
    KubeRay operator of a Kubernetes cluster create one for the run, as `kubernetes` says."""


class HeadPod(Section):
    """The pod of the driver and of Ray's own services; no actor is placed there."""

    cpus: Cores = 4
    """Cores that the pod requests; it may use more where the node has idle ones."""
    memory_gib: Annotated[int, Field(ge=2)] = 16
    """Memory. Ray's services and the driver take about 1 GiB in a small run, more with many pods: set 4 or more."""


class TrainerPod(Section):
    """A pod of trainer ranks, one GPU each. Up to 8 ranks make one pod, more make one for every 8; the first also
    holds queue, rollouter and rewards. The number of pods is fixed for the run.
    """

    cpus: Cores = 16
    """Cores that the pod requests; it may use more where the node has idle ones."""
    memory_gib: Positive = 64
    """Memory, shared memory included."""
    shared_memory_gib: Positive = 16
    """Size of /dev/shm."""


class RolloutPod(Section):
    """A pod of one engine with `rollout.tensor_parallel_size` GPUs."""

    cpus: Cores = 8
    """Cores that the pod requests; it may use more where the node has idle ones."""
    memory_gib: Positive = 64
    """Memory, shared memory included."""
    shared_memory_gib: Positive = 16
    """Size of /dev/shm."""


class KubernetesConfig(Section):
    """The Ray cluster of `cluster.provider: kuberay`. These settings name Secrets and never hold their values."""

    namespace: Annotated[str, Field(pattern=DNS_LABEL, max_length=63)] = "tidemill"
    """Namespace of the cluster; that of the pipeline's own pods, so that they can own it."""
    image: Annotated[str, Field(pattern=TAGGED_IMAGE)] = "tidemill-gpu:0.1.0"
    """Image of all Ray pods, with a tag other than `latest` or a digest."""
    image_pull_secrets: list[ObjectName] = Field(default_factory=list)
    """Secrets to pull the image with."""
    service_account: ObjectName = "tidemill-ray"
    """Service account of the pods; it needs no permission. Only the autoscaler's container sees its token, if the
    cluster grows and shrinks (`max_engines`)."""
    store_secret: ObjectName = "tidemill-store"
    """Secret with the keys `access_key` and `secret_key` of the object store."""
    secrets: list[ObjectName] = Field(default_factory=list)
    """Further secrets whose keys become environment variables of the Ray pods, such as HF_TOKEN."""
    env: dict[Annotated[str, Field(pattern=VARIABLE)], str] = Field(default_factory=dict)
    """Environment variables of the Ray pods; no secrets, and none that a run sets itself."""
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    """Ray's runtime environment, for code that is not in the image: `working_dir`, `py_modules`, `pip`."""
    gpu_resource: Annotated[str, Field(pattern=RESOURCE)] | None = "nvidia.com/gpu"
    """Extended resource of a GPU; null runs on the CPU."""
    gpu_type: Annotated[str, Field(pattern=LABEL, max_length=63)] | None = None
    """Value of the node label `nvidia.com/gpu.product`, such as `NVIDIA-H100-80GB-HBM3`; null allows any."""
    max_engines: Positive | None = None
    """The rollout group grows from `rollout.engines` up to this while the trainer waits for groups, and shrinks again
    while generation waits for the trainer; null keeps `rollout.engines`."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes for trainer and rollout pods."""
    tolerations: list[dict[str, str | int]] = Field(default_factory=list)
    """Taints that trainer and rollout pods tolerate, as in a pod: `key`, `operator`, `value`, `effect`."""
    trainer_priority_class: ObjectName | None = None
    """Priority class of head and trainer pods."""
    rollout_priority_class: ObjectName | None = None
    """Priority class of rollout pods; a run replaces those it loses."""
    queue: ObjectName | None = None
    """Kueue LocalQueue that admits the run; it is created suspended."""
    head: HeadPod = Field(default_factory=HeadPod)
    trainer: TrainerPod = Field(default_factory=TrainerPod)
    rollout: RolloutPod = Field(default_factory=RolloutPod)
    start_timeout_s: Annotated[int, Field(ge=60, le=31_536_000)] = 3600
    """A cluster that does not run by then is deleted, for example for lack of GPUs or after a long image pull."""
    max_hours: Annotated[float, Field(gt=0, le=87_600, allow_inf_nan=False)] = 168.0
    """The whole cluster is deleted after this time in any case."""
    keep_s: Annotated[int, Field(ge=0, le=31_536_000)] = 300
    """Seconds that a finished cluster remains if no step of the pipeline is there to delete it."""
    gpu_hours: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Budget of the run over all attempts, GPUs times hours of their pods. When it is used up, the run commits a
    checkpoint, exports the model, ends and says so. Null sets no budget."""
    pages: dict[str, str] = Field(default_factory=dict)
    """Addresses that a browser can open, for the page of links of a pipeline's first step: `ray`, `mlflow`, `store`."""
    max_restarts: Count = 3
    """Largest number of new clusters for a run whose cluster fails in a way that may pass, such as a lost head pod."""
