"""The names, labels and annotations of a run's Kubernetes objects, and its custom Ray resources.

Names follow from the run's name, so that a restarted step finds the objects that exist.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

PART_OF = "app.kubernetes.io/part-of"
TIDEMILL = "tidemill"
RUN_LABEL = "tidemill.dev/run"
ATTEMPT_LABEL = "tidemill.dev/attempt"
KFP_RUN_LABEL = "tidemill.dev/kfp-run"
HEARTBEAT = "tidemill.dev/heartbeat"
"""Annotation of a RayJob: the time of its watcher's last poll, in seconds since 1970."""
STOP = "tidemill.dev/stop"
"""Annotation of a RayJob: the reason to end it after a checkpoint."""
WORKFLOW_ANNOTATION = "tidemill.dev/workflow"
"""Annotation of a RayJob: the workflow of its pipeline, as NAMESPACE/NAME."""
API_SERVER_LABEL = "tidemill.dev/api-server"
"""Label of pods that the network policies in k8s/ allow to reach the API server."""
LONGEST = 47
"""Largest number of characters in a RayJob's name: KubeRay derives longer names from it."""
DIGEST = 8

# Custom Ray resources by which actors find their pods.
TRAINER_RESOURCE = "tidemill_trainer"
ROLLOUT_RESOURCE = "tidemill_rollout"
SERVICE_RESOURCE = "tidemill_service"


def job_name(run: str, attempt: int) -> str:
    """Name of the RayJob of an attempt, counted from 1: `RUN-aN`, with a long run name shortened.

    It is a DNS-1035 label, which begins with a letter; a run's name may begin with a digit.
    """
    suffix = f"-a{attempt}"
    base = run if re.match(r"[a-z]", run) else f"run-{run}"
    if len(base) + len(suffix) > LONGEST:
        digest = hashlib.sha256(run.encode()).hexdigest()[:DIGEST]
        base = f"{base[: LONGEST - len(suffix) - DIGEST - 1].rstrip('-')}-{digest}"
    return base + suffix


def selector(run: str | None = None) -> str:
    """Label selector of the objects of one run, or of all runs; an empty name selects none."""
    return f"{PART_OF}={TIDEMILL}" + ("" if run is None else f",{RUN_LABEL}={run}")


def attempt_of(labels: Mapping[str, str]) -> int:
    """Number of the attempt that an object belongs to; 0 if its labels name none."""
    number = labels.get(ATTEMPT_LABEL, "")
    return int(number) if number.isdecimal() else 0
