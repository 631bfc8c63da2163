from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from jsonschema import ValidationError
from manifest_rig import (
    APART,
    EXAMPLE,
    GOLDEN,
    LARGE,
    ROOT,
    Tree,
    cluster,
    container,
    group,
    large_run,
    on_kubernetes,
    templates,
)
from rayjob_schema import VERSIONS, check

from tidemill.cli.main import main
from tidemill.config.names import API_SERVER_LABEL, job_name, selector
from tidemill.config.reading import parse_config
from tidemill.errors import ConfigError
from tidemill.kuberay.manifest import MAX_VALUE_BYTES, RAY_VERSION, manifests, ray_job
from tidemill.kuberay.run_status import Owner

COMPILE = ["compile", "--manifests", str(EXAMPLE), *APART]


def variables(template: Tree) -> dict[str, str]:
    """Environment variables as the container sees them."""
    return {e["name"]: e["value"].replace("$$", "$") for e in container(template)["env"] if "value" in e}


def texts(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from (str(key), *texts(value))
    elif isinstance(node, list):
        for value in node:
            yield from texts(value)
    else:
        yield str(node)


def test_a_large_run_is_the_golden_manifest() -> None:
    assert large_run() == yaml.safe_load(GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "overrides", [(), LARGE, ("kubernetes.gpu_resource=null",), ("kubernetes.queue=research",)], ids=repr
)
def test_rayjob_is_valid_for_every_supported_kuberay(overrides: tuple[str, ...], version: str) -> None:
    check(ray_job(on_kubernetes(*overrides), 1), version)


@pytest.mark.parametrize("version", VERSIONS)
def test_unknown_fields_are_not_valid(version: str) -> None:
    job = ray_job(on_kubernetes(), 1)
    cluster(job)["workerGroups"] = []
    with pytest.raises(ValidationError, match="workerGroups"):
        check(job, version)
    with pytest.raises(kubernetes_validate.ValidationError, match="operater"):
        check(ray_job(on_kubernetes("kubernetes.tolerations=[{operater: Exists}]"), 1), version)


def test_every_pod_passes_the_restricted_pod_security_standard() -> None:
    job = ray_job(on_kubernetes(*LARGE), 1)
    restricted = {"allowPrivilegeEscalation": False, "runAsNonRoot": True, "capabilities": {"drop": ["ALL"]}}
    assert cluster(job)["autoscalerOptions"]["securityContext"] == restricted
    for name, template in templates(job).items():
        pod = template["spec"]
        assert pod["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "runAsGroup": 1000,
            "fsGroup": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        files = {"readOnlyRootFilesystem": True} if name == "submitter" else {}  # Ray pods install and compile
        assert [one["securityContext"] for one in pod["containers"]] == [restricted | files]
        assert {kind for volume in pod["volumes"] for kind in volume} <= {"name", "emptyDir", "projected"}
        assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & pod.keys()


@pytest.mark.parametrize("most", [1, 3])
def test_only_the_autoscaler_sees_a_token_of_kubernetes(most: int) -> None:
    job = ray_job(on_kubernetes(f"kubernetes.max_engines={most}"), 1)
    folder = "/var/run/secrets/kubernetes.io/serviceaccount"
    for template in templates(job).values():
        assert template["spec"]["automountServiceAccountToken"] is False
        assert folder not in [mount["mountPath"] for mount in container(template)["volumeMounts"]]
    projected = [v["name"] for v in templates(job)["head"]["spec"]["volumes"] if "projected" in v]
    mounts = cluster(job).get("autoscalerOptions", {}).get("volumeMounts", [])
    assert [(mount["name"], mount["mountPath"]) for mount in mounts] == [(name, folder) for name in projected]
    assert len(projected) == (most > 1)
    reaching = [name for name, t in templates(job).items() if API_SERVER_LABEL in t["metadata"]["labels"]]
    assert reaching == ["head"] * (most > 1)


def test_kuberay_retries_nothing() -> None:
    """kuberay#1902, #2376, #4971: a second submission fails or doubles the run, a second cluster hides the first."""
    spec = ray_job(on_kubernetes(), 1)["spec"]
    assert spec["submissionMode"] == "K8sJobMode"
    assert (spec["submitterConfig"]["backoffLimit"], spec["backoffLimit"]) == (0, 0)
    assert {template["spec"]["restartPolicy"] for template in templates({"spec": spec}).values()} == {"Never"}


def test_the_cluster_ends_whatever_happens() -> None:
    """kuberay#4033, #1990: clusters that nobody deletes, image pulls that never end."""
    times = ("kubernetes.max_hours=1.5", "kubernetes.start_timeout_s=600", "kubernetes.keep_s=60")
    spec = ray_job(on_kubernetes(*times), 1)["spec"]
    assert spec["shutdownAfterJobFinishes"] is True
    assert spec["ttlSecondsAfterFinished"] == 60
    assert spec["activeDeadlineSeconds"] == 5400
    assert spec["preRunningDeadlineSeconds"] == 660  # after the deadline of the watcher, 600 s


def test_the_head_runs_no_actors() -> None:
    """kuberay#4287: actors on the head use the memory that Ray's own services need."""
    head = cluster(ray_job(on_kubernetes(), 1))["headGroupSpec"]
    assert (head["rayStartParams"]["num-cpus"], head["rayStartParams"]["num-gpus"]) == ("0", "0")
    assert "resources" not in head["rayStartParams"]
    assert container(head["template"])["resources"]["limits"] == {"memory": "16Gi"}


@pytest.mark.parametrize(("ranks", "pods", "each"), [(1, 1, 1), (8, 1, 8), (24, 3, 8)])
def test_the_trainer_group_never_changes(ranks: int, pods: int, each: int) -> None:
    """kuberay#3738, #865: an autoscaler leaves workers behind, or takes busy ones."""
    trainer = group(ray_job(on_kubernetes(f"trainer.ranks={ranks}", "kubernetes.max_engines=4"), 1), "trainer")
    assert [trainer[key] for key in ("replicas", "minReplicas", "maxReplicas")] == [pods] * 3
    assert container(trainer["template"])["resources"]["limits"]["nvidia.com/gpu"] == str(each)
    assert trainer["rayStartParams"]["num-gpus"] == str(each)
    assert json.loads(*shlex.split(trainer["rayStartParams"]["resources"])) == {
        "tidemill_trainer": each,
        "tidemill_service": 1000,
    }


@pytest.mark.parametrize(("most", "scales"), [("null", False), ("2", False), ("5", True)])
def test_the_rollout_group_is_elastic_only_with_max_engines(most: str, scales: bool) -> None:
    job = ray_job(on_kubernetes("rollout.engines=2", f"kubernetes.max_engines={most}"), 1)
    rollout = group(job, "rollout")
    assert [rollout[key] for key in ("replicas", "minReplicas")] == [2, 2]
    assert rollout["maxReplicas"] == (5 if scales else 2)
    assert cluster(job).get("enableInTreeAutoscaling", False) is scales
    assert ("autoscalerOptions" in cluster(job)) is scales
    if scales:
        options = cluster(job)["autoscalerOptions"]
        assert (options["version"], options["resources"]["limits"]["memory"]) == ("v2", "1Gi")


def test_every_engine_has_a_pod() -> None:
    """kuberay#2385: the resources of the actors must fit into the largest number of pods."""
    rollout = group(ray_job(on_kubernetes("rollout.tensor_parallel_size=4", "rollout.engines=3"), 1), "rollout")
    assert rollout["replicas"] == 3
    assert container(rollout["template"])["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert json.loads(*shlex.split(rollout["rayStartParams"]["resources"])) == {"tidemill_rollout": 1}


def test_requests_equal_limits_for_gpus_and_memory() -> None:
    for template in templates(ray_job(on_kubernetes(), 1)).values():
        resources = container(template)["resources"]
        assert resources["requests"] == {**resources["limits"], "cpu": resources["requests"]["cpu"]}


def test_without_a_gpu_resource_everything_runs_on_the_cpu() -> None:
    job = ray_job(on_kubernetes("kubernetes.gpu_resource=null", "kubernetes.trainer.cpus=0.5"), 1)
    assert not any("gpu" in key for t in templates(job).values() for key in container(t)["resources"]["limits"])
    for name in ("trainer", "rollout"):
        assert group(job, name)["rayStartParams"]["num-gpus"] == "0"
        assert "tolerations" not in group(job, name)["template"]["spec"]
    assert container(templates(job)["trainer"])["resources"]["requests"]["cpu"] == "0.5"
    assert group(job, "trainer")["rayStartParams"]["num-cpus"] == "1"


def test_pods_that_a_run_cannot_lose_are_not_evicted_by_the_cluster_autoscaler() -> None:
    """ray#64907: the cluster autoscaler of Kubernetes evicts the head of a run that looks idle."""
    found = templates(ray_job(on_kubernetes(), 1))
    kept = {role for role, t in found.items() if "annotations" in t["metadata"]}
    assert kept == {"submitter", "head", "trainer"}
    for role in kept:
        annotations = found[role]["metadata"]["annotations"]
        assert annotations == {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}


def test_head_and_trainer_have_time_for_a_checkpoint_before_they_end() -> None:
    """kueue#7569: a suspended run loses its head and all work since its last checkpoint."""
    for role, template in templates(ray_job(on_kubernetes(), 1)).items():
        hook = container(template).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
        grace = template["spec"].get("terminationGracePeriodSeconds")
        waits = (hook[-1:], grace) == (["tidemill.kuberay.pre_stop"], 120)
        assert waits == (role in ("head", "trainer"))


def test_one_image_and_one_ray_everywhere() -> None:
    """Ray refuses a client of another version."""
    job = ray_job(on_kubernetes("kubernetes.image=registry/tidemill:7"), 1)
    assert {container(template)["image"] for template in templates(job).values()} == {"registry/tidemill:7"}
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert cluster(job)["rayVersion"] == RAY_VERSION
    assert f"ray=={RAY_VERSION}" in pinned


def test_the_head_reads_the_settings_unchanged() -> None:
    """Kubernetes replaces `$(NAME)` in values, and a shell would replace more."""
    config = on_kubernetes("data.system_prompt='$(HOME) costs $5, `ls` 100 €'", "name=tricky")
    told = variables(templates(ray_job(config, 3))["head"])
    read = parse_config(told["TIDEMILL_CONFIG"])
    assert read == config.model_copy(update={"output": Path("/work/runs")})
    assert told["TIDEMILL_ATTEMPT"] == "3"
    assert "$(HOME)" not in "".join(texts(ray_job(config, 3))).replace("$$(HOME)", "")


def test_only_the_head_has_the_variables_of_the_run() -> None:
    job = ray_job(on_kubernetes(), 1, Owner("abc", None, "def"))
    own = {"TIDEMILL_CONFIG", "TIDEMILL_ATTEMPT", "TIDEMILL_KFP_RUN", "MLFLOW_RUN_ID"}
    assert {role: own & variables(t).keys() for role, t in templates(job).items()} == {
        "submitter": set(),
        "head": own,
        "trainer": set(),
        "rollout": set(),
    }


def test_manifests_name_secrets_and_contain_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_S3_ACCESS_KEY", "the-access-key")
    monkeypatch.setenv("TIDEMILL_S3_SECRET_KEY", "the-secret-key")
    job = ray_job(on_kubernetes("kubernetes.store_secret=keys", "kubernetes.secrets=[hub]"), 1)
    assert not any("the-access-key" in text or "the-secret-key" in text for text in texts(job))
    for role in ("head", "trainer", "rollout"):
        one = container(templates(job)[role])
        from_secrets = {e["name"]: e["valueFrom"]["secretKeyRef"] for e in one["env"] if "valueFrom" in e}
        assert from_secrets == {
            "TIDEMILL_S3_ACCESS_KEY": {"name": "keys", "key": "access_key"},
            "TIDEMILL_S3_SECRET_KEY": {"name": "keys", "key": "secret_key"},
        }
        assert one["envFrom"] == [{"secretRef": {"name": "hub"}}]
    assert "envFrom" not in container(templates(job)["submitter"])


def test_a_run_in_a_queue_is_created_suspended() -> None:
    job = ray_job(on_kubernetes("kubernetes.queue=research"), 1)
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert job["spec"]["suspend"] is True
    assert "suspend" not in ray_job(on_kubernetes(), 1)["spec"]


def test_the_objects_of_a_run_have_its_labels() -> None:
    job = ray_job(on_kubernetes("name=my-run"), 4, Owner("abc"))
    assert job["metadata"]["name"] == job_name("my-run", 4)
    for obj in (job, *templates(job).values()):
        labels = obj["metadata"]["labels"]
        assert {f"{key}={value}" for key, value in labels.items()} >= set(selector("my-run").split(","))
        assert (labels["tidemill.dev/attempt"], labels["tidemill.dev/kfp-run"]) == ("4", "abc")


def test_all_writable_volumes_are_deleted_with_the_pod() -> None:
    for role, template in templates(ray_job(on_kubernetes("kubernetes.trainer.shared_memory_gib=3"), 1)).items():
        volumes = {volume["name"]: volume["emptyDir"] for volume in template["spec"]["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container(template)["volumeMounts"]}
        assert mounts["/tmp"] == mounts["/work"] == {}
        memory = {"head": "1Gi", "trainer": "3Gi", "rollout": "16Gi"}.get(role)
        assert mounts.get("/dev/shm", {}).get("sizeLimit") == memory


def test_the_runtime_environment_reaches_ray_unchanged() -> None:
    """KubeRay would pass it through a shell, in double quotes."""
    given = {"pip": ["sympy"], "env_vars": {"A": '$HOME `ls` "$$" é'}}
    job = ray_job(on_kubernetes(f"kubernetes.runtime_env={json.dumps(given)}"), 1)
    template = templates(job)["submitter"]
    assert container(template)["command"] == ["python3", "-m", "tidemill.kuberay.submitter"]
    told = json.loads(variables(template)["TIDEMILL_JOB"])
    assert told == {"entrypoint": job["spec"]["entrypoint"], "runtime_env": given}
    assert yaml.safe_load(job["spec"]["runtimeEnvYAML"]) == given


def test_settings_that_are_too_long_for_a_variable_are_refused() -> None:
    config = on_kubernetes(f"data.system_prompt={'x' * MAX_VALUE_BYTES}")
    with pytest.raises(ConfigError, match=r"config = .* bytes"):
        ray_job(config, 1)


@pytest.mark.parametrize(("most", "sharing"), [("null", {"head", "trainer", "rollout"}), ("9", {"trainer", "rollout"})])
def test_pods_share_a_process_namespace_unless_they_have_the_token_of_the_autoscaler(
    most: str, sharing: set[str]
) -> None:
    """As process 1, KubeRay's shell and a starting Ray ignore SIGTERM and hold the GPUs for 120 s."""
    job = ray_job(on_kubernetes(f"kubernetes.max_engines={most}"), 1)
    assert {role for role, pod in templates(job).items() if pod["spec"].get("shareProcessNamespace")} == sharing


def test_printed_manifests_are_those_that_are_sent(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMPILE, "kubernetes.namespace=research"]) == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed) == ray_job(on_kubernetes("kubernetes.namespace=research"), 1)
    assert "system_prompt: You are a calculator.\n" in printed  # the settings are readable


def test_manifests_can_be_written_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    assert main([*COMPILE, "--output", str(path)]) == 0
    assert path.read_text(encoding="utf-8") == manifests(on_kubernetes())
    assert capsys.readouterr().out == f"wrote {path}\n"


def test_requirements_are_printed_above_the_manifests() -> None:
    text = manifests(
        on_kubernetes(
            "kubernetes.namespace=research",
            "kubernetes.secrets=[hub]",
            "kubernetes.image_pull_secrets=[registry]",
            "kubernetes.queue=gpus",
            "kubernetes.gpu_type=H100",
            "kubernetes.trainer_priority_class=high",
            "kubernetes.rollout_priority_class=high",
        )
    )
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "# Namespace research must have:",
        "# - service account tidemill-ray",
        "# - secret tidemill-store with access_key and secret_key",
        "# - secret hub, whose keys become environment variables",
        "# - secret registry to pull the image with",
        "# - Kueue's LocalQueue gpus",
        "# - priority class high (of the whole cluster)",
        "# - nodes with nvidia.com/gpu.product=H100",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compile", "--manifests", str(EXAMPLE)], "cluster.provider = 'local'. Allowed: kuberay"),
        (["compile", "trainer.steps=3"], "override = 'trainer.steps=3'. Allowed: nothing without --manifests"),
        ([*COMPILE, "--check", "a.yaml"], "--check = 'a.yaml'. Allowed: nothing with --manifests"),
        ([*COMPILE, "--pipeline", "sweep"], "--pipeline = 'sweep'. Allowed: nothing with --manifests"),
        ([*COMPILE, "--output", "/nowhere/a.yaml"], "output = '/nowhere/a.yaml'. Allowed: a file that can be"),
        ([*COMPILE, "kubernetes.image=tidemill:latest"], "kubernetes.image = 'tidemill:latest'"),
    ],
)
def test_refused_arguments_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
