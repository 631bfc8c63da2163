"""Checks of a Kubernetes cluster before a run creates anything: permissions, secrets, nodes, a dry run of the RayJob.

A check that needs a permission which the pipeline's role does not have is skipped, so that the role stays minimal.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.config.kubernetes import RANKS_PER_POD
from tidemill.config.run import RunConfig
from tidemill.errors import ClusterError, ConfigError
from tidemill.kuberay.cluster import (
    CONFIG_MAPS,
    EVENTS,
    NODES,
    PODS,
    RAY_JOBS,
    SECRETS,
    Cluster,
    Kind,
    Object,
    labels_of,
)
from tidemill.kuberay.manifest import ray_job
from tidemill.kuberay.pods import GPU_PRODUCT, STORE_KEYS, node_labels

LOGS = Kind("", "v1", "pods/log")
PERMISSIONS: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    (RAY_JOBS, ("create", "get", "list", "patch", "delete")),
    (PODS, ("list",)),
    (LOGS, ("get",)),
    (EVENTS, ("list",)),
    (CONFIG_MAPS, ("create", "get", "patch")),
)
"""What the steps of a run do in its namespace; the role `tidemill-pipeline` of k8s/ allows exactly this."""


def check_access(config: RunConfig, cluster: Cluster) -> None:
    """Refuse a run that its cluster would refuse.

    Raises:
        ConfigError: a setting does not fit the cluster.
        ClusterError: a permission, KubeRay or the namespace is missing, or the API server refuses the RayJob.
        RunError: the cluster cannot be reached.
    """
    check_permissions(config.kubernetes.namespace, cluster)
    cluster.dry_run_create(RAY_JOBS, ray_job(config, 1))
    if cluster.is_allowed("get", SECRETS):
        check_secrets(config, cluster)
    if cluster.is_allowed("list", NODES):
        check_nodes(config, cluster.list(NODES))


def check_permissions(namespace: str, cluster: Cluster) -> None:
    missing = [
        f"{', '.join(refused)} {kind}"
        for kind, verbs in PERMISSIONS
        if (refused := [verb for verb in verbs if not cluster.is_allowed(verb, kind)])
    ]
    if missing:
        raise ClusterError(
            f"no permission in namespace {namespace} to {'; '.join(missing)}. Run as service account "
            "tidemill-pipeline of k8s/, or bind its role to your account."
        )


def check_secrets(config: RunConfig, cluster: Cluster) -> None:
    settings = config.kubernetes
    wanted = [("kubernetes.store_secret", settings.store_secret, sorted(STORE_KEYS.values()))]
    wanted += [("kubernetes.secrets", name, []) for name in settings.secrets]
    wanted += [("kubernetes.image_pull_secrets", name, []) for name in settings.image_pull_secrets]
    for key, name, fields in wanted:
        secret = cluster.get(SECRETS, name)
        if secret is None:
            fix = "Create it (k8s/ has a template), or correct the name."
            raise ConfigError(key, name, f"a secret of namespace {settings.namespace}", fix)
        missing = [field for field in fields if field not in (secret.get("data") or {})]
        if missing:
            raise ConfigError(key, name, f"a secret with {' and '.join(fields)}", f"Add {' and '.join(missing)}.")


def check_nodes(config: RunConfig, nodes: Sequence[Object]) -> None:
    """A cluster that creates nodes on demand may have none yet: its pipeline must not be allowed to list nodes."""
    wanted, resource = node_labels(config), config.kubernetes.gpu_resource
    product = config.kubernetes.gpu_type
    products = {labels_of(node).get(GPU_PRODUCT) for node in nodes} - {None}
    if product is not None and product not in products:
        names = ", ".join(sorted(map(str, products))) or "none has a GPU"
        raise ConfigError("kubernetes.gpu_type", product, f"a GPU that some node has: {names}", "Choose one of them.")
    fitting = [node for node in nodes if wanted.items() <= labels_of(node).items()]
    if not fitting:
        fix = f"No node has all of {','.join(f'{key}={value}' for key, value in wanted.items())}."
        raise ConfigError("kubernetes.node_selector", config.kubernetes.node_selector, "labels of some node", fix)
    if resource is None:
        return
    most = max(int(node["status"]["allocatable"].get(resource, 0)) for node in fitting)
    for key, value, needed in (
        ("trainer.ranks", config.trainer.ranks, min(config.trainer.ranks, RANKS_PER_POD)),
        ("rollout.tensor_parallel_size", config.rollout.tensor_parallel_size, config.rollout.tensor_parallel_size),
    ):
        if needed > most:
            fix = f"A pod needs {needed} on one node, and no matching node has more than {most}."
            raise ConfigError(key, value, f"no more than the {resource} of a node", fix)
