from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Callable
from typing import Any

import pytest
from manifest_rig import LARGE, ROOT, Tree, cluster, group, large_run, on_kubernetes, templates

from tidemill.errors import ConfigError
from tidemill.kuberay.manifest import ray_job
from tidemill.kuberay.schema import check
from tidemill.kuberay.schema_maker import FILE, closed, condense, shared

Change = Callable[[Tree], object]
TRAINER = "spec.rayClusterSpec.workerGroupSpecs[0]"
HEAD = "spec.rayClusterSpec.headGroupSpec"


def trainer(job: Tree) -> Tree:
    return group(job, "trainer")


def pod(job: Tree) -> Tree:
    return templates(job)["head"]["spec"]


def refused(change: Change) -> str:
    """What is said of a manifest that is right but for one change."""
    job = copy.deepcopy(large_run())
    change(job)
    with pytest.raises(ConfigError) as caught:
        check(job)
    return str(caught.value)


@pytest.mark.parametrize(
    "overrides", [(), LARGE, ("kubernetes.gpu_resource=null",), ("kubernetes.queue=research",)], ids=repr
)
def test_what_we_make_is_taken(overrides: tuple[str, ...]) -> None:
    check(ray_job(on_kubernetes(*overrides), 1))
    check(large_run())


@pytest.mark.parametrize(
    ("change", "path", "allowed"),
    [
        (lambda job: trainer(job).update(minReplica=1), f"{TRAINER}.minReplica = 1", "minReplicas instead"),
        (lambda job: trainer(job).update(minReplicas="1"), f"{TRAINER}.minReplicas = '1'", "type integer"),
        (lambda job: trainer(job).pop("groupName"), f"{TRAINER}.groupName = null", "a value"),
        (lambda job: job["spec"].update(entryPoint="x"), "spec.entryPoint = 'x'", "entrypoint instead"),
        (lambda job: job.update(apiVersion="ray.io/v1alpha1"), "apiVersion = 'ray.io/v1alpha1'", "ray.io/v1"),
        (lambda job: job["spec"].update(activeDeadlineSeconds=2**31), "spec.activeDeadlineSeconds", "2147483647"),
        (lambda job: job["spec"].update(status={}), "spec.status = {}", "one of the keys activeDeadlineSeconds, "),
        (
            lambda job: pod(job)["containers"][0]["env"].append({"name": "A", "value": 1}),
            f"{HEAD}.template.spec.containers[0].env[",
            "type string",
        ),
        (
            lambda job: pod(job)["containers"][0]["resources"]["limits"].update(memory="16 GiB"),
            f"{HEAD}.template.spec.containers[0].resources.limits.memory = '16 GiB'",
            "pattern ",
        ),
        (
            lambda job: pod(job)["containers"][0]["securityContext"].update(allowPrivilegeEscalation="no"),
            f"{HEAD}.template.spec.containers[0].securityContext.allowPrivilegeEscalation = 'no'",
            "type boolean",
        ),
        (
            lambda job: cluster(job)["autoscalerOptions"].update(version="v3"),
            "spec.rayClusterSpec.autoscalerOptions.version = 'v3'",
            "v2",
        ),
    ],
)
def test_what_the_schema_of_the_cluster_does_not_take_is_refused(change: Change, path: str, allowed: str) -> None:
    said = refused(change)
    assert said.startswith(path) and allowed in said


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda job: job["metadata"].update(name="7b-math-a1"), "metadata.name = '7b-math-a1'"),
        (lambda job: job["metadata"].update(name="x" * 48), "metadata.name = 'xxx"),
        (lambda job: job["metadata"]["labels"].update(a="b/c"), "metadata.labels.a = 'b/c'"),
        (lambda job: job["spec"].update(submissionMode="SidecarMode"), "spec.submitterPodTemplate"),
        (lambda job: job["spec"].update(submissionMode="InteractiveMode", backoffLimit=1), "spec.backoffLimit = 1"),
        (lambda job: job["spec"].update(clusterSelector={"a": "b"}, backoffLimit=1), "spec.backoffLimit = 1"),
        (lambda job: job["spec"].update(managedBy="me"), "spec.managedBy = 'me'"),
        (lambda job: job["spec"].update(suspend=True, shutdownAfterJobFinishes=False), "spec.suspend = true"),
        (lambda job: job["spec"].update(activeDeadlineSeconds=0), "spec.activeDeadlineSeconds = 0"),
        (lambda job: job["spec"].update(ttlSecondsAfterFinished=-1), "spec.ttlSecondsAfterFinished = -1"),
        (
            lambda job: job["spec"].update(
                deletionStrategy={"deletionRules": [{"policy": "DeleteSelf", "condition": {"ttlSeconds": 1}}]},
                shutdownAfterJobFinishes=False,
            ),
            "spec.deletionStrategy.deletionRules[0].condition = []",
        ),
        (
            lambda job: job["spec"].update(
                deletionStrategy={
                    "deletionRules": [{"policy": "DeleteSelf", "condition": {"jobStatus": "FAILED", "ttlSeconds": 1}}]
                }
            ),
            "spec.deletionStrategy = ",
        ),
        (lambda job: job["spec"].pop("rayClusterSpec"), "spec.rayClusterSpec = null"),
        (
            lambda job: cluster(job).update(gcsFaultToleranceOptions={"redisAddress": "redis:6379"}),
            "spec.rayClusterSpec.gcsFaultToleranceOptions",
        ),
        (
            lambda job: cluster(job).update(upgradeStrategy={"type": "Recreate"}),
            "spec.rayClusterSpec.upgradeStrategy.type",
        ),
        (
            lambda job: cluster(job)["authOptions"].update(enableK8sTokenAuth=True),
            "spec.rayClusterSpec.authOptions.enableK8sTokenAuth",
        ),
        (lambda job: cluster(job).update(rayVersion="2.51.3"), "spec.rayClusterSpec.rayVersion = '2.51.3'"),
        (lambda job: cluster(job).pop("rayVersion"), "spec.rayClusterSpec.rayVersion = ''"),
        (lambda job: pod(job).update(restartPolicy="Always"), f"{HEAD}.template.spec.restartPolicy = 'Always'"),
        (
            lambda job: trainer(job)["template"]["spec"].update(restartPolicy="OnFailure"),
            f"{TRAINER}.template.spec.restartPolicy = 'OnFailure'",
        ),
        (lambda job: trainer(job).update(resources={"GPU": "8"}), f"{TRAINER}.resources"),
        (lambda job: pod(job).update(containers=[]), f"{HEAD}.template.spec.containers = []"),
        (lambda job: trainer(job).update(minReplicas=3), f"{TRAINER}.replicas = 2: allowed is from minReplicas 3"),
        (lambda job: trainer(job).update(replicas=9), f"{TRAINER}.replicas = 9"),
    ],
)
def test_what_kuberay_would_refuse_minutes_later_is_refused(change: Change, path: str) -> None:
    assert refused(change).startswith(path)


def test_a_wrong_key_of_a_setting_is_named() -> None:
    config = on_kubernetes("kubernetes.tolerations=[{key: a, operater: Exists}]")
    with pytest.raises(ConfigError, match=re.escape("tolerations[1].operater = 'Exists': allowed is operator instead")):
        check(ray_job(config, 1))


def test_a_condensed_schema_is_closed_and_takes_both_kinds_of_quantities() -> None:
    quantity = {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}]}
    limits = {"type": "object", "additionalProperties": quantity, "description": "What it may use."}
    node: dict[str, Any] = {"type": "object", "properties": {"limits": limits}, "description": "A container."}
    assert closed(node) == {
        "type": "object",
        "properties": {"limits": {"type": "object", "additionalProperties": {"type": ["integer", "string"]}}},
        "additionalProperties": False,
    }


def test_a_part_that_repeats_is_written_once() -> None:
    part = {"type": "object", "properties": {name: {"type": "string"} for name in "abcdef"}}
    small = shared({"type": "object", "properties": {"one": part, "two": part}})
    [name] = small["$defs"]
    assert small["properties"] == {"one": {"$ref": f"#/$defs/{name}"}, "two": {"$ref": f"#/$defs/{name}"}}
    assert small["$defs"][name] == part


def test_only_the_version_that_we_send_is_condensed() -> None:
    def version(name: str, field: str) -> Tree:
        spec = {"type": "object", "properties": {field: {"type": "string"}}}
        return {"name": name, "schema": {"openAPIV3Schema": {"properties": {"spec": spec, "status": {}}}}}

    crd = {
        "spec": {
            "group": "ray.io",
            "names": {"kind": "RayJob"},
            "versions": [version("v1alpha1", "old"), version("v1", "new")],
        }
    }
    assert list(condense(crd)["properties"]["spec"]["properties"]) == ["new"]


def test_the_shipped_schema_is_in_the_wheel() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert FILE.name in settings["package-data"]["tidemill.kuberay"]
