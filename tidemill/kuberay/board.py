"""What was last known of a run, for whoever asks later: a ConfigMap that outlives the RayJobs of the run.

It belongs to the pipeline's workflow where there is one, and goes with it; the reaper takes old ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tidemill.kuberay.cluster import CONFIG_MAPS, Cluster, Object
from tidemill.kuberay.names import KFP_RUN_LABEL, PART_OF, RUN_LABEL, TIDEMILL
from tidemill.kuberay.owner import Owner

LONGEST = 4000
"""Characters of a fact: a traceback may be long, and a ConfigMap holds 1 MiB."""


@dataclass(slots=True)
class Board:
    """The notes about one run. All facts are text: `phase`, `progress`, `attempt`, `step`, `steps`, `gpu_hours`,
    `failure` (of the attempt before), `error` (why the run ended), `links`, `updated` (seconds since 1970).
    """

    cluster: Cluster
    run: str
    owner: Owner
    made: bool = field(default=False)

    def post(self, **facts: object) -> None:
        """Write facts in the place of earlier ones of the same names; None removes one."""
        data = {name: None if fact is None else str(fact)[:LONGEST] for name, fact in facts.items()}
        if not self.made:
            self.cluster.create(CONFIG_MAPS, self.empty())
            self.made = True
        metadata = {"labels": self.labels()}
        self.cluster.patch(CONFIG_MAPS, board_name(self.run), {"metadata": metadata, "data": data})

    def empty(self) -> Object:
        """The ConfigMap without facts."""
        reference = self.owner.reference
        metadata: dict[str, object] = {"name": board_name(self.run), "labels": self.labels()}
        if reference is not None:
            metadata["ownerReferences"] = [reference.as_dict()]
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}

    def labels(self) -> dict[str, str]:
        """How it is found."""
        labels = {PART_OF: TIDEMILL, RUN_LABEL: self.run}
        return labels if self.owner.kfp_run is None else labels | {KFP_RUN_LABEL: self.owner.kfp_run}


def board_name(run: str) -> str:
    """Name of the ConfigMap."""
    return f"tidemill-run-{run}"
