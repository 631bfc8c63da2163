"""What KubeRay 1.7.0 refuses although the schema of its CRD takes it: the operator's validation.go and the CRD's rules
in CEL, which no JSON schema holds. And what it takes although a run would suffer from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tidemill.config.names import LONGEST

DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
LONGEST_LABEL = 63
TOKENS_SINCE = (2, 52)
AMOUNTS = ("num-cpus", "num-gpus", "memory", "resources")
MANAGERS = ("ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue")
Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Mistake:
    """A value that is refused, where it stands and what would be right."""

    path: str
    value: object
    allowed: str


def broken_rules(manifest: Tree) -> Iterator[Mistake]:
    """Everything in a RayJob that fits the schema and does not work."""
    spec = manifest["spec"]
    yield from marks(manifest["metadata"])
    yield from submission(spec)
    yield from lifetime(spec)
    if "rayClusterSpec" not in spec:
        yield Mistake("spec.rayClusterSpec", None, "the cluster of the job")
        return
    cluster = spec["rayClusterSpec"]
    yield from features(cluster)
    yield from tokens(cluster)
    yield from autoscaling(cluster)
    for path, group in groups(cluster):
        yield from amounts(path, group)
    for number, group in enumerate(cluster.get("workerGroupSpecs", [])):
        replicas = f"spec.rayClusterSpec.workerGroupSpecs[{number}]"
        yield from sizes(replicas, group, scales=bool(cluster.get("enableInTreeAutoscaling")))


def marks(metadata: Tree) -> Iterator[Mistake]:
    """Name and labels."""
    name = metadata.get("name", "")
    if len(name) > LONGEST or not DNS_1035.fullmatch(name):
        allowed = f"a letter, then letters, digits and dashes, {LONGEST} characters at most"
        yield Mistake("metadata.name", name, allowed)
    for key, value in metadata.get("labels", {}).items():
        if len(value) > LONGEST_LABEL or not LABEL_VALUE.fullmatch(value):
            allowed = f"letters, digits, dashes, dots and underscores, {LONGEST_LABEL} characters at most"
            yield Mistake(f"metadata.labels.{key}", value, allowed)


def submission(spec: Tree) -> Iterator[Mistake]:
    """How the job gets to Ray, and how often."""
    mode, retries, selector = spec.get("submissionMode"), spec.get("backoffLimit", 0), spec.get("clusterSelector")
    if retries and (selector or mode == "InteractiveMode"):
        yield Mistake("spec.backoffLimit", retries, "0 with clusterSelector or submissionMode InteractiveMode")
    if mode == "SidecarMode":
        for key in ("submitterPodTemplate", "submitterConfig"):
            if key in spec:
                yield Mistake(f"spec.{key}", "given", "nothing with submissionMode SidecarMode")
    if spec.get("managedBy", MANAGERS[0]) not in MANAGERS:
        yield Mistake("spec.managedBy", spec["managedBy"], f"one of {', '.join(MANAGERS)}")


def lifetime(spec: Tree) -> Iterator[Mistake]:
    """When the cluster ends."""
    shutdown, strategy = spec.get("shutdownAfterJobFinishes", False), spec.get("deletionStrategy")
    if spec.get("suspend") and (not shutdown or spec.get("clusterSelector")):
        yield Mistake("spec.suspend", True, "false without shutdownAfterJobFinishes, or with clusterSelector")
    for key in ("activeDeadlineSeconds", "preRunningDeadlineSeconds"):
        if spec.get(key, 1) <= 0:
            yield Mistake(f"spec.{key}", spec[key], "more than 0")
    if spec.get("ttlSecondsAfterFinished", 0) < 0:
        yield Mistake("spec.ttlSecondsAfterFinished", spec["ttlSecondsAfterFinished"], "0 or more")
    if strategy is not None and shutdown and "deletionRules" in strategy:
        yield Mistake("spec.deletionStrategy", "given", "nothing with shutdownAfterJobFinishes")
    for number, rule in enumerate((strategy or {}).get("deletionRules", [])):
        given = {"jobStatus", "jobDeploymentStatus"} & rule["condition"].keys()
        if len(given) != 1:
            path = f"spec.deletionStrategy.deletionRules[{number}].condition"
            yield Mistake(path, sorted(given), "one of jobStatus and jobDeploymentStatus")


def features(cluster: Tree) -> Iterator[Mistake]:
    """What a cluster of a RayJob cannot have."""
    if "gcsFaultToleranceOptions" in cluster:
        allowed = "nothing: a RayJob never gets the same head again, a run goes on from its checkpoint"
        yield Mistake("spec.rayClusterSpec.gcsFaultToleranceOptions", "given", allowed)
    if cluster.get("upgradeStrategy", {}).get("type"):
        yield Mistake("spec.rayClusterSpec.upgradeStrategy.type", cluster["upgradeStrategy"]["type"], "nothing")


def tokens(cluster: Tree) -> Iterator[Mistake]:
    """Whether this Ray can ask for a token."""
    options = cluster.get("authOptions", {})
    if options.get("enableK8sTokenAuth"):
        yield Mistake("spec.rayClusterSpec.authOptions.enableK8sTokenAuth", True, "false in a RayJob")
    version = str(cluster.get("rayVersion", ""))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if options.get("mode") == "token" and (numbers is None or tuple(map(int, numbers.groups())) < TOKENS_SINCE):
        allowed = f"{'.'.join(map(str, TOKENS_SINCE))} or later with authOptions.mode token"
        yield Mistake("spec.rayClusterSpec.rayVersion", version, allowed)


def groups(cluster: Tree) -> Iterator[tuple[str, Tree]]:
    """The head and every group of workers, with their paths."""
    yield "spec.rayClusterSpec.headGroupSpec", cluster["headGroupSpec"]
    for number, group in enumerate(cluster.get("workerGroupSpecs", [])):
        yield f"spec.rayClusterSpec.workerGroupSpecs[{number}]", group


def autoscaling(cluster: Tree) -> Iterator[Mistake]:
    """The second autoscaler replaces pods, it does not restart them."""
    if not cluster.get("enableInTreeAutoscaling") or cluster.get("autoscalerOptions", {}).get("version") != "v2":
        return
    for path, group in groups(cluster):
        policy = group["template"]["spec"].get("restartPolicy", "Never")
        if policy != "Never":
            yield Mistake(f"{path}.template.spec.restartPolicy", policy, "Never with autoscaler v2")


def amounts(path: str, group: Tree) -> Iterator[Mistake]:
    """What Ray is told of a pod stands in one place, and no pod is empty."""
    if group.get("resources") and any(group.get("rayStartParams", {}).get(key) for key in AMOUNTS):
        yield Mistake(f"{path}.resources", group["resources"], f"nothing beside rayStartParams {', '.join(AMOUNTS)}")
    if not group["template"]["spec"]["containers"]:
        yield Mistake(f"{path}.template.spec.containers", [], "at least one container")


def sizes(path: str, group: Tree, *, scales: bool) -> Iterator[Mistake]:
    """How many pods a group has."""
    fewest, most = group.get("minReplicas"), group.get("maxReplicas")
    if not scales and (fewest is None or most is None):
        yield Mistake(f"{path}.minReplicas", fewest, "given, and maxReplicas too, without an autoscaler")
    if fewest is not None and most is not None and not 0 <= fewest <= group.get("replicas", fewest) <= most:
        yield Mistake(f"{path}.replicas", group.get("replicas"), f"from minReplicas {fewest} to maxReplicas {most}")
