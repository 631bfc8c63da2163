"""What is asked of a Kubernetes cluster before anything is paid for: permissions, secrets, nodes, and whether the API
server would take the RayJob.

Looks that we may not take are left out: permissions stay the least that a run needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from tidemill.config.kubernetes import RANKS_PER_POD
from tidemill.config.run import RunConfig
from tidemill.errors import ClusterError, ConfigError
from tidemill.kuberay.cluster import CONFIG_MAPS, EVENTS, NODES, PODS, RAY_JOBS, SECRETS, Kind, Object, labels_of
from tidemill.kuberay.kinds import Labels
from tidemill.kuberay.manifest import ray_job
from tidemill.kuberay.pods import GPU_PRODUCT, STORE_KEYS, node_labels
from tidemill.kuberay.schema import check

LOGS = Kind("", "v1", "pods/log")
PERMISSIONS: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    (RAY_JOBS, ("create", "get", "list", "patch", "delete")),
    (PODS, ("list",)),
    (LOGS, ("get",)),
    (EVENTS, ("list",)),
    (CONFIG_MAPS, ("create", "get", "patch")),
)
"""What the steps of a run do in its namespace; the role `tidemill-pipeline` of k8s/ allows just that."""


class Inspected(Protocol):
    """The part of `cluster.Cluster` that is needed here."""

    def get(self, kind: Kind, name: str) -> Object | None:
        """An object, None where there is none of this name."""
        ...

    def list(self, kind: Kind, selector: str = "") -> Sequence[Object]:
        """The objects that a label selector chooses."""
        ...

    def may(self, verb: str, kind: Kind) -> bool:
        """Whether we have a permission in the namespace."""
        ...

    def rehearse(self, kind: Kind, manifest: Object) -> None:
        """Have the cluster check an object as if it were made."""
        ...


def check_access(config: RunConfig, cluster: Inspected) -> None:
    """Refuse a run that its cluster would not take.

    Raises:
        ConfigError: naming the setting that does not fit the cluster.
        ClusterError: a permission is missing, KubeRay or the namespace is, or the cluster refuses the RayJob.
        RunError: the cluster cannot be reached.
    """
    check_permissions(config.kubernetes.namespace, cluster)
    job = ray_job(config, 1)
    check(job)
    cluster.rehearse(RAY_JOBS, job)
    if cluster.may("get", SECRETS):
        check_secrets(config, cluster)
    if cluster.may("list", NODES):
        check_nodes(config, cluster.list(NODES))


def check_permissions(namespace: str, cluster: Inspected) -> None:
    """See that we may do what the steps of a run do.

    Raises:
        ClusterError: naming everything that we may not.
    """
    missing = [
        f"{', '.join(refused)} {kind}"
        for kind, verbs in PERMISSIONS
        if (refused := [verb for verb in verbs if not cluster.may(verb, kind)])
    ]
    if missing:
        raise ClusterError(
            f"no permission in namespace {namespace} to {'; '.join(missing)}. Run as service account "
            "tidemill-pipeline of k8s/, or bind its role to who runs this."
        )


def check_secrets(config: RunConfig, cluster: Inspected) -> None:
    """See that every secret is there, and the object store's keys in it.

    Raises:
        ConfigError: naming the setting and the secret.
    """
    settings = config.kubernetes
    wanted = [("kubernetes.store_secret", settings.store_secret, sorted(STORE_KEYS.values()))]
    wanted += [("kubernetes.secrets", name, []) for name in settings.secrets]
    wanted += [("kubernetes.image_pull_secrets", name, []) for name in settings.image_pull_secrets]
    for key, name, fields in wanted:
        secret = cluster.get(SECRETS, name)
        if secret is None:
            fix = "Make it (k8s/ has a template), or mend the name."
            raise ConfigError(key, name, f"a secret of namespace {settings.namespace}", fix)
        absent = [field for field in fields if field not in (secret.get("data") or {})]
        if absent:
            fix = f"It has no {' and no '.join(absent)}: add what is missing."
            raise ConfigError(key, name, f"a secret with {' and '.join(fields)}", fix)


def check_nodes(config: RunConfig, nodes: Sequence[Object]) -> None:
    """See that some node is of the kind that the run wants, and has enough GPUs for one of its pods.

    Where nodes are made on demand there may be none yet: then the pipeline is not given the permission to list them.

    Raises:
        ConfigError: naming the setting and what there is instead.
    """
    wanted, resource = node_labels(config), config.kubernetes.gpu_resource
    product = config.kubernetes.gpu_type
    if product is not None and not any(labels_of(node).get(GPU_PRODUCT) == product for node in nodes):
        there = named({labels_of(node)[GPU_PRODUCT] for node in nodes if GPU_PRODUCT in labels_of(node)})
        raise ConfigError("kubernetes.gpu_type", product, f"a GPU that some node has: {there}", "Choose one of them.")
    fitting = [node for node in nodes if wanted.items() <= labels_of(node).items()]
    if not fitting:
        fix = f"No node has all of {as_text(wanted)}."
        raise ConfigError("kubernetes.node_selector", config.kubernetes.node_selector, "labels of some node", fix)
    if resource is None:
        return
    most = max(int(node["status"]["allocatable"].get(resource, 0)) for node in fitting)
    for key, value, needed in (
        ("trainer.ranks", config.trainer.ranks, min(config.trainer.ranks, RANKS_PER_POD)),
        ("rollout.tensor_parallel_size", config.rollout.tensor_parallel_size, config.rollout.tensor_parallel_size),
    ):
        if needed > most:
            fix = f"A pod needs {needed} on one node, and no node that fits has more than {most}."
            raise ConfigError(key, value, f"no more than the {resource} of a node", fix)


def named(words: Iterable[str]) -> str:
    """Words in order, or that there are none."""
    return ", ".join(sorted(words)) or "there is none"


def as_text(labels: Labels) -> str:
    """Labels as `kubectl` takes them."""
    return ",".join(f"{key}={value}" for key, value in labels.items())
