"""Who owns the objects of a run: the workflow that the pipeline's steps are pods of.

When the workflow is deleted, Kubernetes deletes what it owns; the last of the guarantees that GPUs come back.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from tidemill.kuberay.cluster import WORKFLOWS, Cluster
from tidemill.kuberay.kinds import OwnerReference

WORKFLOW = "TIDEMILL_WORKFLOW"
"""Environment variable of a step: name of its Argo Workflow, from the pod's label."""
KFP_RUN = "TIDEMILL_KFP_RUN"
"""Environment variable of a step: id of its KFP run."""
MLFLOW_RUN = "MLFLOW_RUN_ID"


@dataclass(frozen=True, slots=True)
class Owner:
    """The pipeline run that an attempt belongs to.

    Attributes:
        kfp_run: id of the KFP run, None outside of one.
        reference: as in `metadata.ownerReferences`, None without a workflow.
        mlflow_run: run that KFP's MLflow plugin made for the step, None without it.
    """

    kfp_run: str | None = None
    reference: OwnerReference | None = None
    mlflow_run: str | None = None

    @classmethod
    def of_this_step(cls, cluster: Cluster) -> Owner:
        """The pipeline run that this process is a step of.

        A workflow that is gone owns nothing: the other guarantees remain.

        Raises:
            ClusterError, RunError: the cluster refuses the look, or cannot be reached.
        """
        name = os.environ.get(WORKFLOW)
        workflow = cluster.get(WORKFLOWS, name) if name else None
        reference = None if workflow is None else OwnerReference(name=str(name), uid=workflow["metadata"]["uid"])
        return cls(this_kfp_run(), reference, os.environ.get(MLFLOW_RUN) or None)


def this_kfp_run() -> str | None:
    """Id of the KFP run that this process is a step of, None outside of one."""
    return os.environ.get(KFP_RUN) or None
