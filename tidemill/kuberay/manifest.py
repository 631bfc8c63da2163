"""The RayJob of a run: a head without work, a group of trainer pods and a group of rollout pods.

One RayJob is one attempt. KubeRay tries nothing of it again, because a second try goes on from a checkpoint, under the
next number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
from tidemill.kuberay.kinds import (
    AutoscalerOptions,
    HeadGroup,
    Labels,
    Metadata,
    OwnerReference,
    RayClusterSpec,
    RayJob,
    RayJobSpec,
    Resources,
    SubmitterConfig,
    WorkerGroup,
)
from tidemill.kuberay.pods import (
    RUNS,
    TOKEN,
    head_template,
    rollout_template,
    submitter_template,
    trainer_template,
)

RAY_VERSION = "2.60.0"
"""Ray of the image and of whoever talks to it."""
ENTRYPOINT = "python3 -m tidemill.driver.job"
SERVICES = 1000
"""Queue, rollouter and the like that trainer pods have room for: as good as any number."""
WATCHER_FIRST_S = 60
"""KubeRay's own deadline comes later than the watcher's, which can say what the pods wait for."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
IDLE_SECONDS = 60
"""An engine's pod that is idle for so long is given back, where the group is elastic."""
AUTOSCALER = Resources(requests={"cpu": "200m", "memory": "1Gi"}, limits={"memory": "1Gi"})
GIB = 2**30
HEAD_OBJECT_STORE = GIB // 4
OBJECT_STORE_SHARE = 4
"""Ray's own objects, which are groups, get this part of a pod's shared memory; weights need the rest."""
LONGEST_VALUE = 120_000
"""Bytes of an environment variable: Linux takes 128 KiB with its name."""


def ray_job(
    config: RunConfig,
    attempt: int,
    *,
    owner: OwnerReference | None = None,
    kfp_run_id: str | None = None,
    mlflow_run_id: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The RayJob of an attempt, as the API takes it.

    Args:
        config: of the run; `output` becomes a folder of the pod.
        attempt: counted from 1.
        owner: whose deletion deletes the RayJob; in the same namespace.
        kfp_run_id: of the pipeline that runs it, as a label and to the head as TIDEMILL_KFP_RUN.
        mlflow_run_id: run that the training goes on in, as MLFLOW_RUN_ID.
        environment: further variables of the head.

    Raises:
        ConfigError: the settings are too long for an environment variable.
    """
    labels = run_labels(config, attempt, kfp_run_id)
    ids = {"MLFLOW_RUN_ID": mlflow_run_id, "TIDEMILL_KFP_RUN": kfp_run_id}
    told = {
        **(environment or {}),
        "TIDEMILL_ATTEMPT": str(attempt),
        "TIDEMILL_CONFIG": travelling(config),
        **{name: value for name, value in ids.items() if value is not None},
    }
    queue = config.kubernetes.queue
    metadata = Metadata(
        name=job_name(config.name, attempt),
        namespace=config.kubernetes.namespace,
        labels=labels | ({} if queue is None else {QUEUE_LABEL: queue}),
        owner_references=None if owner is None else [owner],
    )
    return RayJob(metadata=metadata, spec=job_spec(config, labels, told)).as_dict()


def run_labels(config: RunConfig, attempt: int, kfp_run_id: str | None) -> Labels:
    """How the RayJob, its cluster and its pods are found."""
    labels = {PART_OF: TIDEMILL, RUN_LABEL: config.name, ATTEMPT_LABEL: str(attempt)}
    return labels if kfp_run_id is None else labels | {KFP_RUN_LABEL: kfp_run_id}


def travelling(config: RunConfig) -> str:
    """The settings as the head reads them, writing to a folder of its pod.

    Raises:
        ConfigError: they are too long.
    """
    text = config.model_copy(update={"output": Path(RUNS)}).to_yaml()
    if len(text.encode()) > LONGEST_VALUE:
        fix = "Put long values, such as options, into files of the image."
        raise ConfigError("config", f"{len(text.encode())} bytes", f"up to {LONGEST_VALUE} bytes", fix)
    return text


def job_spec(config: RunConfig, labels: Labels, told: Mapping[str, str]) -> RayJobSpec:
    """What runs and for how long."""
    settings = config.kubernetes
    return RayJobSpec(
        entrypoint=ENTRYPOINT,
        runtime_env_yaml=yaml.safe_dump(settings.runtime_env) if settings.runtime_env else None,
        submitter_config=SubmitterConfig(backoff_limit=0),
        submitter_pod_template=submitter_template(config, labels, ENTRYPOINT),
        backoff_limit=0,
        ttl_seconds_after_finished=settings.keep_s,
        active_deadline_seconds=math.ceil(settings.max_hours * 3600),
        pre_running_deadline_seconds=settings.start_timeout_s + WATCHER_FIRST_S,
        suspend=None if settings.queue is None else True,
        ray_cluster_spec=cluster_spec(config, labels, told),
    )


def cluster_spec(config: RunConfig, labels: Labels, told: Mapping[str, str]) -> RayClusterSpec:
    """The pods; the rollout group grows and shrinks if the settings say so."""
    scales = elastic(config)
    options = AutoscalerOptions(idle_timeout_seconds=IDLE_SECONDS, resources=AUTOSCALER, volume_mounts=[TOKEN])
    return RayClusterSpec(
        ray_version=RAY_VERSION,
        enable_in_tree_autoscaling=True if scales else None,
        autoscaler_options=options if scales else None,
        head_group_spec=HeadGroup(
            ray_start_params={
                "num-cpus": "0",
                "num-gpus": "0",
                "dashboard-host": "0.0.0.0",
                "object-store-memory": str(HEAD_OBJECT_STORE),
            },
            template=head_template(config, labels, told, scales=scales),
        ),
        worker_group_specs=[trainer_group(config, labels), rollout_group(config, labels)],
    )


def elastic(config: RunConfig) -> bool:
    """Whether engines may come and go."""
    most = config.kubernetes.max_engines
    return most is not None and most > config.rollout.engines


def trainer_group(config: RunConfig, labels: Labels) -> WorkerGroup:
    """Pods of up to eight ranks; their number never changes."""
    ranks = min(config.trainer.ranks, RANKS_PER_POD)
    pods = max(1, config.trainer.ranks // RANKS_PER_POD)
    own = {TRAINER_RESOURCE: ranks, SERVICE_RESOURCE: SERVICES}
    return WorkerGroup(
        group_name="trainer",
        replicas=pods,
        min_replicas=pods,
        max_replicas=pods,
        ray_start_params=start_params(config, config.kubernetes.trainer, ranks, own),
        template=trainer_template(config, labels, ranks),
    )


def rollout_group(config: RunConfig, labels: Labels) -> WorkerGroup:
    """A pod for every engine."""
    engines, gpus = config.rollout.engines, config.rollout.tensor_parallel_size
    return WorkerGroup(
        group_name="rollout",
        replicas=engines,
        min_replicas=engines,
        max_replicas=config.kubernetes.max_engines or engines,
        ray_start_params=start_params(config, config.kubernetes.rollout, gpus, {ROLLOUT_RESOURCE: 1}),
        template=rollout_template(config, labels),
    )


def start_params(config: RunConfig, size: TrainerPod | RolloutPod, gpus: int, own: Mapping[str, int]) -> Labels:
    """Options of `ray start` in a worker; KubeRay puts them into a shell, hence the quotes."""
    return {
        "num-cpus": str(math.ceil(size.cpus)),
        "num-gpus": str(gpus if config.kubernetes.gpu_resource else 0),
        "object-store-memory": str(size.shared_memory_gib * GIB // OBJECT_STORE_SHARE),
        "resources": f"'{json.dumps(own)}'",
    }
