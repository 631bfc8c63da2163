"""What was last known of a run, for whoever asks later: a ConfigMap that outlives the RayJobs of the run.

It also holds what its watcher has to know between two attempts, when there is no RayJob to tell it by: that a person
stopped the run, or that it was given back. It belongs to the pipeline's workflow where there is one, and goes with it;
the reaper takes old ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tidemill.config.names import KFP_RUN_LABEL, PART_OF, RUN_LABEL, TIDEMILL
from tidemill.errors import ClusterError, RunError, TidemillError
from tidemill.kuberay.cluster import CONFIG_MAPS, Cluster, Object
from tidemill.kuberay.owner import Owner
from tidemill.kuberay.state import Phase

LONGEST = 4000
"""Characters of a fact: a traceback may be long, and a ConfigMap holds 1 MiB."""
STOPPED, ENDED, ENDED_OF = "stopped", "ended", "ended_of"
"""Facts: why the run is to end after a checkpoint; why it has ended; and for which KFP run, "" for all."""
FAILED = "failed"
"""Fact: number of the attempt that its watcher takes away to begin another one."""


@dataclass(slots=True)
class Board:
    """The notes about one run. All facts are text: `phase`, `progress`, `attempt`, `step`, `steps`, `gpu_hours`,
    `failure` (of the attempt before), `error` (why the run ended), `links`, `updated` (seconds since 1970), and
    `stopped`, `ended`, `ended_of`, `failed`.
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

    def fail(self, error: TidemillError, **facts: object) -> None:
        """Note why the run ended; that this does not go may be the reason why it did."""
        try:
            self.post(phase=Phase.FAILED, progress=None, error=error, **facts)
        except (ClusterError, RunError) as unposted:
            error.add_note(f"This could not be noted for `tidemill status`: {unposted}")

    def ended(self) -> str | None:
        """Why the run has ended, as far as our pipeline run is concerned; None if it has not."""
        facts = self.facts()
        return facts.get(ENDED) if facts.get(ENDED_OF, "") in ("", self.owner.kfp_run) else None

    def closed(self) -> str | None:
        """Why no further attempt may begin, None if one may."""
        return self.ended() or self.facts().get(STOPPED)

    def facts(self) -> Mapping[str, str]:
        """What is noted."""
        return (self.cluster.get(CONFIG_MAPS, board_name(self.run)) or {}).get("data") or {}

    def open(self) -> None:
        """Let attempts begin, whatever ended the run before."""
        self.post(**dict.fromkeys((STOPPED, ENDED, ENDED_OF, FAILED)))

    def given_back(self) -> bool:
        """Whether our own pipeline run was over and gave the run back, which it does after all of its steps."""
        return self.owner.kfp_run is not None and self.facts().get(ENDED_OF) == self.owner.kfp_run

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


def close(cluster: Cluster, run: str, **facts: str) -> bool:
    """Have no further attempt at a run begin; a run that nobody has noted anything of has no watcher.

    Who may end runs and not write notes ends the attempt that there is all the same.

    Args:
        cluster: where it is.
        run: its name.
        facts: `stopped`, or `ended` and `ended_of`.

    Returns:
        Whether we may.
    """
    allowed = cluster.may("patch", CONFIG_MAPS)
    if allowed:
        cluster.patch(CONFIG_MAPS, board_name(run), {"data": facts})
    return allowed
