"""The status of a run in a ConfigMap, which outlives the RayJobs of the run.

`tidemill status` shows it. It also tells the watcher what happened while no RayJob existed: a user stopped the run, or
the exit handler released it. Kubernetes deletes the ConfigMap together with the pipeline's workflow, if a workflow owns
it; the reaper deletes old ones.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tidemill.config.names import KFP_RUN_LABEL, PART_OF, RUN_LABEL, TIDEMILL
from tidemill.errors import ClusterError, RunError, TidemillError
from tidemill.kuberay.cluster import CONFIG_MAPS, WORKFLOWS, Cluster, Object
from tidemill.kuberay.job_state import Phase

WORKFLOW = "TIDEMILL_WORKFLOW"
"""Environment variable of a pipeline step: name of its Argo Workflow, from the pod's label."""
KFP_RUN = "TIDEMILL_KFP_RUN"
"""Environment variable of a pipeline step: id of its KFP run."""
MLFLOW_RUN = "MLFLOW_RUN_ID"
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""Holds the namespace of a pod."""
MAX_CHARACTERS = 4000
"""Length of a field at most: a traceback can be long, and a ConfigMap holds 1 MiB."""
STOPPED, ENDED, ENDED_OF = "stopped", "ended", "ended_of"
"""Fields: why the run ends after a checkpoint; why the run has ended; the KFP run this concerns, "" for any."""
FAILED = "failed"
"""Field: number of the failed attempt that the watcher is deleting before it starts the next one."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The pipeline run that an attempt belongs to.

    Attributes:
        kfp_run: id of the KFP run, None outside of one.
        reference: entry of `metadata.ownerReferences`, None without a workflow in the namespace of the run. Kubernetes
            deletes what the workflow owns when the workflow is deleted.
        mlflow_run: id of the run that KFP's MLflow plugin created for the step, None without the plugin.
        workflow: NAMESPACE/NAME of the workflow in any namespace, None without one. The reaper deletes the RayJob when
            the workflow is deleted.
    """

    kfp_run: str | None = None
    reference: Object | None = None
    mlflow_run: str | None = None
    workflow: str | None = None

    @classmethod
    def of_this_step(cls, cluster: Cluster, namespace_file: Path = NAMESPACE_FILE) -> Owner:
        """The pipeline run that this process is a step of; a workflow that is already deleted owns nothing.

        Args:
            cluster: namespace of the run.
            namespace_file: names the namespace of this pod, which is that of the workflow.

        Raises:
            ClusterError, RunError: the cluster refuses the request, or cannot be reached.
        """
        kfp_run, mlflow_run, name = this_kfp_run(), os.environ.get(MLFLOW_RUN) or None, os.environ.get(WORKFLOW)
        if not name:
            return cls(kfp_run, None, mlflow_run)
        namespace = own_namespace(namespace_file) or cluster.namespace
        found = cluster.get(WORKFLOWS, name) if namespace == cluster.namespace else None
        reference = None if found is None else owner_reference(name, found["metadata"]["uid"])
        return cls(kfp_run, reference, mlflow_run, f"{namespace}/{name}")


NOBODY = Owner()
"""Of an attempt outside of a pipeline."""


def owner_reference(name: str, uid: str, kind: str = "Workflow", api_version: str = "argoproj.io/v1alpha1") -> Object:
    return {"name": name, "uid": uid, "apiVersion": api_version, "kind": kind}


def own_namespace(namespace_file: Path = NAMESPACE_FILE) -> str | None:
    """The namespace of this pod, None outside of a cluster."""
    return namespace_file.read_text(encoding="utf-8").strip() if namespace_file.is_file() else None


def this_kfp_run() -> str | None:
    """Id of the KFP run that this process is a step of, None outside of one."""
    return os.environ.get(KFP_RUN) or None


@dataclass(slots=True)
class RunStatus:
    """The ConfigMap of one run.

    All fields are text: `phase`, `progress`, `attempt`, `step`, `steps`, `gpu_hours`, `failure` (of the previous
    attempt), `error` (why the run ended), `links`, `updated` (seconds since 1970), and `stopped`, `ended`, `ended_of`,
    `failed`.
    """

    cluster: Cluster
    run: str
    owner: Owner
    created: bool = False

    def update(self, **fields: object) -> None:
        """Set fields; None removes a field."""
        data = {name: None if value is None else str(value)[:MAX_CHARACTERS] for name, value in fields.items()}
        if not self.created:
            self.cluster.create(CONFIG_MAPS, self.empty())
            self.created = True
        metadata = {"labels": self.labels()}
        self.cluster.patch(CONFIG_MAPS, config_map_name(self.run), {"metadata": metadata, "data": data})

    def fail(self, error: TidemillError, **fields: object) -> None:
        """Record why the run ended. An unreachable cluster may be that reason, so a failure to record is no error."""
        try:
            self.update(phase=Phase.FAILED, progress=None, error=error, **fields)
        except (ClusterError, RunError) as cause:
            error.add_note(f"`tidemill status` does not show this error, because it could not be recorded: {cause}")

    def fields(self) -> Mapping[str, str]:
        return (self.cluster.get(CONFIG_MAPS, config_map_name(self.run)) or {}).get("data") or {}

    def ended(self) -> str | None:
        """Why the run has ended for this pipeline run; None if it has not."""
        fields = self.fields()
        return fields.get(ENDED) if fields.get(ENDED_OF, "") in ("", self.owner.kfp_run) else None

    def closed(self) -> str | None:
        """Why no further attempt may start, None if one may."""
        return self.ended() or self.fields().get(STOPPED)

    def reopen(self) -> None:
        """Allow attempts again, whatever ended the run before."""
        self.update(**dict.fromkeys((STOPPED, ENDED, ENDED_OF, FAILED)))

    def released(self) -> bool:
        """Whether this pipeline run has already released the run, which its exit handler does after all other steps."""
        return self.owner.kfp_run is not None and self.fields().get(ENDED_OF) == self.owner.kfp_run

    def empty(self) -> Object:
        metadata: dict[str, object] = {"name": config_map_name(self.run), "labels": self.labels()}
        if self.owner.reference is not None:
            metadata["ownerReferences"] = [self.owner.reference]
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}

    def labels(self) -> dict[str, str]:
        labels = {PART_OF: TIDEMILL, RUN_LABEL: self.run}
        return labels if self.owner.kfp_run is None else labels | {KFP_RUN_LABEL: self.owner.kfp_run}


def config_map_name(run: str) -> str:
    return f"tidemill-run-{run}"


def close(cluster: Cluster, run: str, **fields: str) -> bool:
    """Prevent further attempts at a run; a run without a ConfigMap has no watcher.

    A client without permission to patch ConfigMaps can still delete the current attempt, so this is no error.

    Args:
        cluster: the namespace of the run.
        run: name of the run.
        fields: `stopped`, or `ended` and `ended_of`.

    Returns:
        Whether this client has the permission.
    """
    allowed = cluster.is_allowed("patch", CONFIG_MAPS)
    if allowed:
        cluster.patch(CONFIG_MAPS, config_map_name(run), {"data": fields})
    return allowed
