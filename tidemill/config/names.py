"""How the objects of a run are called in a cluster, and what they are labelled with.

Names follow from the run, so that whoever comes again, after a restart for example, finds what there is.
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
"""Annotation of a RayJob: when its watcher last looked, in seconds since 1970."""
STOP = "tidemill.dev/stop"
"""Annotation of a RayJob: why it is to end after a checkpoint."""
API_SERVER_LABEL = "tidemill.dev/api-server"
"""Label of pods that the network policies of k8s/ let reach the API server."""
LONGEST = 47
"""Characters of a RayJob's name: KubeRay makes longer ones from it."""
DIGEST = 8

# Custom Ray resources by which actors find their pods.
TRAINER_RESOURCE = "tidemill_trainer"
ROLLOUT_RESOURCE = "tidemill_rollout"
SERVICE_RESOURCE = "tidemill_service"


def job_name(run: str, attempt: int) -> str:
    """Name of the RayJob of an attempt, counted from 1: `RUN-aN`, a long run's name shortened.

    A DNS-1035 label begins with a letter, which a run's name need not.
    """
    suffix = f"-a{attempt}"
    base = run if re.match(r"[a-z]", run) else f"run-{run}"
    if len(base) + len(suffix) > LONGEST:
        digest = hashlib.sha256(run.encode()).hexdigest()[:DIGEST]
        base = f"{base[: LONGEST - len(suffix) - DIGEST - 1].rstrip('-')}-{digest}"
    return base + suffix


def selector(run: str | None = None) -> str:
    """Label selector of the objects of one run, or of all; a name that is empty, such as of a variable, is no run's."""
    return f"{PART_OF}={TIDEMILL}" + ("" if run is None else f",{RUN_LABEL}={run}")


def attempt_of(labels: Mapping[str, str]) -> int:
    """Number of the attempt that an object belongs to; 0 where its labels name none."""
    number = labels.get(ATTEMPT_LABEL, "")
    return int(number) if number.isdecimal() else 0
