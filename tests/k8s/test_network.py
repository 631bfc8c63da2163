"""The connections that the network policies of k8s/ allow, evaluated like in a network plugin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any

import pytest
from kustomize_rig import K8S, matches, of_kind, pods

SPACE = "tidemill"
ALONE = frozenset[str]()
KFP, PROFILE, HUB, POSTGRES = "kubeflow", "profile", "hub", "mlflow-database"


@dataclass(frozen=True)
class End:
    """One end of a connection: a pod, or an address outside of the cluster."""

    labels: Mapping[str, str] = field(default_factory=dict)
    space: str = SPACE
    address: str | None = None


def of(name: str) -> End:
    """The pods of a deployment, job or cron job."""
    return End(next(pod["metadata"]["labels"] for manifest, pod in pods() if manifest.tree["metadata"]["name"] == name))


def policies(components: frozenset[str]) -> Iterator[Mapping[str, Any]]:
    """Specs of the policies of the base and of components."""
    places = [K8S / "base", *(K8S / "components" / name for name in components)]
    for manifest in of_kind("NetworkPolicy"):
        if any(manifest.file.is_relative_to(place) for place in places):
            yield manifest.tree["spec"]


def meets(peer: Mapping[str, Any], end: End) -> bool:
    """Whether a rule selects an end."""
    if "ipBlock" in peer:
        block = peer["ipBlock"]
        inside = [block["cidr"], *block.get("except", ())]
        found = [end.address is not None and ip_address(end.address) in ip_network(cidr) for cidr in inside]
        return found[0] and not any(found[1:])
    if end.address is not None:
        return False
    spaces = peer.get("namespaceSelector", {"matchLabels": {"kubernetes.io/metadata.name": SPACE}})
    return matches(spaces, {"kubernetes.io/metadata.name": end.space}) and matches(
        peer.get("podSelector", {}), end.labels
    )


def lets(end: End, other: End, port: int, way: str, components: frozenset[str]) -> bool:
    """Whether the policies of one side allow a connection; other namespaces have no policies."""
    if end.address is not None or end.space != SPACE:
        return True
    peer = {"egress": "to", "ingress": "from"}[way]
    rules = [r for spec in policies(components) if matches(spec["podSelector"], end.labels) for r in spec.get(way, ())]
    return any(
        ("ports" not in rule or port in [p["port"] for p in rule["ports"]])
        and (peer not in rule or any(meets(each, other) for each in rule[peer]))
        for rule in rules
    )


def may_reach(source: End, target: End, port: int, components: frozenset[str] = ALONE) -> bool:
    """Whether a pod may open a connection."""
    return lets(source, target, port, "egress", components) and lets(target, source, port, "ingress", components)


RAY = {"ray.io/cluster": "a", "app.kubernetes.io/part-of": "tidemill"}
HEAD = End(RAY | {"ray.io/node-type": "head"})
ELASTIC_HEAD = End(HEAD.labels | {"tidemill.dev/api-server": "true"})
TRAINER = End(RAY | {"ray.io/node-type": "worker", "ray.io/group": "trainer"})
ENGINE = End(RAY | {"ray.io/node-type": "worker", "ray.io/group": "rollout"})
SUBMITTER = End({"job-name": "addition-a1", "app.kubernetes.io/part-of": "tidemill"})
STEP = End({"workflows.argoproj.io/workflow": "addition-x"})
KFP_STEP = End(STEP.labels, space="kubeflow")
KFP_API = End({"app": "ml-pipeline"}, space="kubeflow")
KFP_STORE = End({"app": "seaweedfs"}, space="kubeflow")
OPERATOR = End({"app.kubernetes.io/component": "kuberay-operator"}, space="kuberay-system")
DNS = End({"k8s-app": "kube-dns"}, space="kube-system")
NEIGHBOUR = End({"app": "any"}, space="neighbour")
STORE, MLFLOW, SETUP, REAPER = (of(name) for name in ("minio", "mlflow", "store-setup", "tidemill-reaper"))
EVERY = (HEAD, ELASTIC_HEAD, TRAINER, ENGINE, SUBMITTER, STEP, STORE, MLFLOW, SETUP, REAPER)
API_SERVERS = (End(address="10.96.0.1"), End(address="203.0.113.7"))
METADATA = tuple(End(address=address) for address in ("169.254.169.254", "169.254.170.2", "169.254.170.23"))
OUTSIDE = End(address="203.0.113.8")
RAY_PORTS = (6379, 8265, 10002, 19999, 52365)


@pytest.mark.parametrize("port", RAY_PORTS)
def test_ray_pods_reach_each_other_on_all_ports(port: int) -> None:
    assert all(may_reach(one, other, port) for one in (HEAD, TRAINER, ENGINE) for other in (HEAD, TRAINER, ENGINE))


@pytest.mark.parametrize(
    ("source", "target", "port", "expected"),
    [
        (SUBMITTER, HEAD, 8265, True),
        (SUBMITTER, HEAD, 6379, False),
        (SUBMITTER, STORE, 9000, False),
        (OPERATOR, HEAD, 8265, True),
        (OPERATOR, HEAD, 6379, False),
        (OPERATOR, TRAINER, 8265, False),
        (TRAINER, STORE, 9000, True),
        (TRAINER, STORE, 9001, False),
        (ENGINE, STORE, 9000, True),
        (HEAD, MLFLOW, 5000, True),
        (TRAINER, SETUP, 9000, False),
        (STEP, MLFLOW, 5000, True),
        (STEP, STORE, 9000, True),
        (STEP, HEAD, 8265, False),
        (STEP, KFP_API, 8887, True),
        (STEP, KFP_STORE, 9000, True),
        (MLFLOW, STORE, 9000, True),
        (MLFLOW, HEAD, 8265, False),
        (SETUP, STORE, 9000, True),
        (SETUP, MLFLOW, 5000, False),
        (REAPER, STORE, 9000, False),
        (REAPER, KFP_API, 8888, False),
        (STORE, MLFLOW, 5000, False),
        (KFP_STEP, STORE, 9000, False),
        (KFP_API, MLFLOW, 5000, False),
    ],
)
def test_policies_allow_exactly_the_needed_connections(source: End, target: End, port: int, expected: bool) -> None:
    assert may_reach(source, target, port) is expected


@pytest.mark.parametrize(
    ("source", "target", "port", "component"),
    [
        (KFP_STEP, STORE, 9000, KFP),
        (KFP_STEP, MLFLOW, 5000, KFP),
        (KFP_API, MLFLOW, 5000, KFP),  # KFP's MLflow plugin
        (KFP_API, MLFLOW, 5000, PROFILE),
        (REAPER, KFP_API, 8888, KFP),
        (TRAINER, OUTSIDE, 443, HUB),
        (MLFLOW, End(address="10.1.2.3"), 5432, POSTGRES),
    ],
)
def test_components_allow_their_connections(source: End, target: End, port: int, component: str) -> None:
    assert not may_reach(source, target, port)
    assert may_reach(source, target, port, frozenset({component}))


@pytest.mark.parametrize("port", [80, 443, 5000, 6379, 8265, 9000])
def test_pods_of_other_namespaces_reach_nothing(port: int) -> None:
    everything = frozenset({KFP, PROFILE, HUB, POSTGRES})
    assert [end for end in EVERY if may_reach(NEIGHBOUR, end, port, everything)] == []
    assert [end for end in EVERY if may_reach(end, NEIGHBOUR, port, everything)] == []


def test_every_pod_reaches_dns() -> None:
    assert all(may_reach(end, DNS, 53) for end in EVERY)


def test_only_pods_with_a_token_reach_the_api_server() -> None:
    for server in API_SERVERS:
        for port in (443, 6443):
            assert [end for end in EVERY if may_reach(end, server, port)] == [ELASTIC_HEAD, STEP, REAPER]


@pytest.mark.parametrize("metadata", METADATA, ids=lambda end: end.address)
@pytest.mark.parametrize("port", [80, 443, 6443, 5432])
def test_no_pod_reaches_the_metadata_service(metadata: End, port: int) -> None:
    everything = frozenset({KFP, PROFILE, HUB})
    assert [end for end in EVERY if may_reach(end, metadata, port, everything)] == []


@pytest.mark.parametrize("address", ["10.96.0.1", "100.64.0.1", "172.20.0.1", "192.168.0.1"])
def test_egress_excludes_private_networks(address: str) -> None:
    assert not may_reach(TRAINER, End(address=address), 443, frozenset({HUB}))


def test_everything_is_denied_by_default() -> None:
    deny = next(m.tree for m in of_kind("NetworkPolicy") if m.tree["metadata"]["name"] == "default-deny")
    assert deny["spec"] == {"podSelector": {}, "policyTypes": ["Egress", "Ingress"]}
