"""The roles of the service accounts match the calls of the code to the API server."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from kustomize_rig import K8S, ROOT, of_kind

from tidemill.kuberay import access, cluster
from tidemill.kuberay.cluster import Kind
from tidemill.kuberay.pre_stop import GRACE_S

Rule = tuple[str, str, str]  # API group, resource, verb
VERBS = {
    "create": ("create", "get"),  # an existing object is read
    "dry_run_create": ("create",),
    "get": ("get",),
    "list": ("list",),
    "patch": ("patch",),
    "delete": ("delete",),
}
LOGS = {"log", "follow"}
KINDS = {name: value for module in (cluster, access) for name, value in vars(module).items() if isinstance(value, Kind)}
# Runs as the reaper; the steps of a pipeline call all other modules.
REAPER = "reap.py"
# The protocol, its implementations, and what a user calls with their own account.
OUTSIDE = {"client.py", "cluster.py", "fake.py", "status.py"}
# Used only if the account has it: see the docstring of tidemill.kuberay.access.
OPTIONAL = {("", "secrets", "get")}


def calls(path: Path) -> Iterator[Rule]:
    """Permissions of a module: each call of the protocol with the name of a kind, or with each kind of a loop."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    loops = {name: kinds for node in ast.walk(tree) for name, kinds in loop(node)}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        method = node.func.attr
        if method in LOGS and on_cluster(node.func.value):
            yield "", "pods/log", "get"
        if method in VERBS and node.args and isinstance(node.args[0], ast.Name):
            for name in loops.get(node.args[0].id, (node.args[0].id,)):
                if name in KINDS:
                    yield from ((KINDS[name].group, KINDS[name].plural, verb) for verb in VERBS[method])


def loop(node: ast.AST) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The variable of `for KIND in (A, B)`, and the names of its values."""
    if not isinstance(node, ast.For | ast.comprehension):
        return
    if isinstance(node.target, ast.Name) and isinstance(node.iter, ast.Tuple):
        yield node.target.id, tuple(item.id for item in node.iter.elts if isinstance(item, ast.Name))


def on_cluster(node: ast.expr) -> bool:
    return (isinstance(node, ast.Name) and node.id == "cluster") or (
        isinstance(node, ast.Attribute) and node.attr == "cluster"
    )


def asked(*, by_reaper: bool) -> set[Rule]:
    room = [path for path in (ROOT / "tidemill" / "kuberay").glob("*.py") if path.name not in OUTSIDE]
    return {rule for path in room if (path.name == REAPER) is by_reaper for rule in calls(path)}


def granted(account: str) -> set[Rule]:
    """Permissions that the roles of the base give to an account of its namespace."""
    roles = {(m.tree["kind"], m.tree["metadata"]["name"]): m.tree for m in base("Role", "ClusterRole")}
    bound = [
        roles[m.tree["roleRef"]["kind"], m.tree["roleRef"]["name"]]
        for m in base("RoleBinding", "ClusterRoleBinding")
        if account in [subject["name"] for subject in m.tree["subjects"]]
    ]
    return {rule for role in bound for rule in rules_of(role)}


def rules_of(role: Mapping[str, Any]) -> set[Rule]:
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def base(*kinds: str) -> list:
    return [manifest for manifest in of_kind(*kinds) if manifest.file.is_relative_to(K8S / "base")]


@pytest.mark.parametrize(("account", "by_reaper"), [("tidemill-pipeline", False), ("tidemill-reaper", True)])
def test_role_is_exactly_what_the_code_calls(account: str, by_reaper: bool) -> None:
    assert granted(account) == asked(by_reaper=by_reaper) - OPTIONAL


def test_the_reaper_reads_workflows_where_the_steps_run() -> None:
    """In the namespace of the run (KFP with profiles), and in that of KFP."""
    workflows = ("argoproj.io", "workflows", "get")
    assert workflows in granted("tidemill-reaper")
    by_kfp = [m.tree for m in of_kind("Role", "RoleBinding") if m.file.is_relative_to(K8S / "components" / "kubeflow")]
    role, binding = (
        tree for tree in by_kfp if tree["metadata"] == {"name": "tidemill-reaper", "namespace": "kubeflow"}
    )
    assert rules_of(role) == {workflows}
    assert binding["roleRef"]["name"] == "tidemill-reaper"
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "tidemill-reaper", "namespace": "tidemill"}]


def test_gpus_of_a_run_without_a_workflow_are_free_within_five_minutes() -> None:
    [reaper] = [m.tree["spec"] for m in of_kind("CronJob")]
    every = re.fullmatch(r"\*/(\d+) \* \* \* \*", reaper["schedule"])
    assert every is not None
    starts_s = 60
    assert 60 * int(every[1]) + starts_s + GRACE_S <= 300


def test_checked_permissions_are_those_of_the_role() -> None:
    checked = {(kind.group, kind.plural, verb) for kind, verbs in access.PERMISSIONS for verb in verbs}
    assert checked <= granted("tidemill-pipeline")


def test_ray_pods_have_no_permission() -> None:
    assert granted("tidemill-ray") == set()


# KFP 2.17: backend/src/v2 of kubeflow/pipelines, config/env.go, objectstore/object_store.go and the MLflow plugin.
# Argo: docs/service-accounts.md. Names are those of KFP's own manifests; None is any name.
BY_KFP = {
    ("argoproj.io", "workflowtaskresults", "create", None),
    ("argoproj.io", "workflowtaskresults", "patch", None),
    ("", "configmaps", "get", "kfp-launcher"),
    ("", "secrets", "get", "mlpipeline-minio-artifact"),
    ("", "secrets", "get", "kfp-mlflow-credentials"),
}


@pytest.mark.parametrize(
    ("component", "role", "place"),
    [("kubeflow", "tidemill-pipeline", "kubeflow"), ("profile", "tidemill-steps", "tidemill")],
)
def test_a_step_has_the_permissions_that_kfp_uses(component: str, role: str, place: str) -> None:
    roles = [m.tree for m in of_kind("Role") if m.file.is_relative_to(K8S / "components" / component)]
    [found] = [tree for tree in roles if tree["metadata"] == {"name": role, "namespace": place}]
    assert {
        (group, resource, verb, name)
        for rule in found["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", (None,))
    } == BY_KFP
    bindings = [m.tree for m in of_kind("RoleBinding") if m.file.is_relative_to(K8S / "components" / component)]
    bound = [b for b in bindings if b["roleRef"]["name"] == role and b["metadata"]["namespace"] == place]
    assert [[subject["name"] for subject in b["subjects"]] for b in bound] == [["tidemill-pipeline"]]


def test_only_secrets_of_kfp_can_be_read() -> None:
    rules = [rule for m in of_kind("Role", "ClusterRole") for rule in m.tree["rules"] if "secrets" in rule["resources"]]
    assert {name for rule in rules for name in rule["resourceNames"]} == {
        n for _, what, _, n in BY_KFP if what == "secrets"
    }


def test_roles_have_no_wildcards_and_only_service_accounts() -> None:
    rules = [rule for m in of_kind("Role", "ClusterRole") for rule in m.tree["rules"]]
    assert not [rule for rule in rules if "*" in rule["verbs"] + rule["resources"] + rule["apiGroups"]]
    subjects = [s for m in of_kind("RoleBinding", "ClusterRoleBinding") for s in m.tree["subjects"]]
    assert {subject["kind"] for subject in subjects} == {"ServiceAccount"}
