"""The compiled pipelines, and their settings for Kubernetes."""

from __future__ import annotations

import ast
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tidemill_components
import yaml
from google.protobuf.json_format import ParseDict
from kfp.kubernetes.kubernetes_executor_config_pb2 import KubernetesExecutorConfig
from kfp.pipeline_spec.pipeline_spec_pb2 import PipelineSpec, PlatformSpec
from tidemill_pipelines import tasks as pods
from tidemill_pipelines.catalogue import PIPELINES

import tidemill
from tidemill.cli.main import main
from tidemill.config.kubernetes import KubernetesConfig
from tidemill.steps.request import DEFAULTS

ROOT = Path(__file__).parents[2]
COMPILED = ROOT / "pipelines/compiled"
COMPONENTS = sorted(path for path in (ROOT / "components").glob("*.py") if path.stem != "__init__")
IMAGE_PARAMETER = "{{$.inputs.parameters['pipelinechannel--steps_image']}}"
STEPS = {
    "post_training": {"validate", "provision", "train", "evaluate", "register", "teardown"},
    "sweep": {"validate-sweep", "provision", "train", "evaluate", "finish-variant", "select-best", "teardown"},
    "continual": {"prepare-continual", "provision", "train", "evaluate", "register", "record-progress", "teardown"},
}
FIRST = {"post_training": "validate", "sweep": "validate-sweep", "continual": "prepare-continual"}
FORM = {*DEFAULTS, "config", "overrides", "run_name", "store_secret", "steps_image"}
MORE = {"post_training": set(), "sweep": {"variants"}, "continual": {"prompts"}}
LESS = {"post_training": set(), "sweep": set(), "continual": {"data_train"}}
LIMIT_BYTES = 256 * 1024  # a workflow is about three times as large, and etcd takes 1.5 MiB
EACH = pytest.mark.parametrize("name", PIPELINES)
DAY = 24 * 3600


def golden(name: str) -> Path:
    return COMPILED / f"{name}.yaml"


def documents(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(pipeline, platform settings for Kubernetes)."""
    spec, platform = yaml.safe_load_all(golden(name).read_text(encoding="utf-8"))
    return spec, platform["platforms"]["kubernetes"]


def tasks(name: str) -> dict[str, dict[str, Any]]:
    """Every step of a compiled pipeline, including those in loops and conditions."""
    spec, _ = documents(name)
    dags = [spec["root"]["dag"], *(c["dag"] for c in spec["components"].values() if "dag" in c)]
    found = {name: task for dag in dags for name, task in dag["tasks"].items()}
    return {name: task for name, task in found.items() if "dag" not in spec["components"][task["componentRef"]["name"]]}


def inputs_around(name: str, step: str) -> set[str]:
    """Parameters of the graph that contains a step."""
    spec, _ = documents(name)
    graphs = [spec["root"], *(component for component in spec["components"].values() if "dag" in component)]
    [graph] = [graph for graph in graphs if step in graph["dag"]["tasks"]]
    return set(graph["inputDefinitions"]["parameters"])


def executors(name: str) -> dict[str, dict[str, Any]]:
    """The Kubernetes settings of every step."""
    found = documents(name)[1]["deploymentSpec"]["executors"]
    return {label.removeprefix("exec-"): executor for label, executor in found.items()}


def test_command_line_knows_every_pipeline() -> None:
    assert sorted(path.stem for path in COMPILED.glob("*.yaml")) == sorted(PIPELINES) == sorted(STEPS)
    assert f"PIPELINES := {' '.join(PIPELINES)}\n" in (ROOT / "Makefile").read_text()


@EACH
def test_compiled_pipeline_is_current(name: str) -> None:
    assert main(["compile", "--pipeline", name, "--check", str(golden(name))]) == 0


def test_stale_pipeline_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stale = tmp_path / "old.yaml"
    stale.write_text(golden("post_training").read_text().replace("post-training", "pre-training"))
    assert main(["compile", "--check", str(stale)]) == 1
    assert "out of date" in capsys.readouterr().err


def test_compile_writes_the_golden_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["compile", "--pipeline", "sweep"]) == 0
    assert (tmp_path / "sweep.yaml").read_text() == golden("sweep").read_text()


def test_compile_into_a_missing_folder_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--output", str(tmp_path / "none/pipeline.yaml")]) == 2
    assert "can be written" in capsys.readouterr().err


@EACH
def test_every_step_is_a_component(name: str) -> None:
    assert set(tasks(name)) == STEPS[name]
    assert {path.stem.replace("_", "-") for path in COMPONENTS} == set().union(*STEPS.values())


@EACH
def test_pipeline_is_small_enough_for_etcd(name: str) -> None:
    assert golden(name).stat().st_size < LIMIT_BYTES


@EACH
def test_steps_are_few_and_few_run_at_once(name: str) -> None:
    """pipelines#13179, #13276: KFP's metadata store deadlocks if many steps report at once."""
    assert len(tasks(name)) <= 8
    spec, _ = documents(name)
    graphs = [spec["root"], *(component for component in spec["components"].values() if "dag" in component)]
    every = [task for graph in graphs for task in graph["dag"]["tasks"].values()]
    loops = [task for task in every if "parameterIterator" in task or "artifactIterator" in task]
    assert [task["iteratorPolicy"]["parallelismLimit"] for task in loops] == ([4] if name == "sweep" else [])


@EACH
def test_nothing_is_cached(name: str) -> None:
    assert {step: task["cachingOptions"] for step, task in tasks(name).items()} == {step: {} for step in STEPS[name]}


@EACH
def test_repeatable_steps_are_retried_and_no_others(name: str) -> None:
    retried = {step for step, task in tasks(name).items() if "retryPolicy" in task}
    assert retried == STEPS[name] - {FIRST[name]}


@EACH
def test_steps_that_kfp_may_retry_try_again_themselves(name: str) -> None:
    """A stock KFP retries a step whose pod is lost, and no step that fails."""
    executors = documents(name)[0]["deploymentSpec"]["executors"]
    texts = {key.removeprefix("exec-"): str(value["container"]["command"]) for key, value in executors.items()}
    assert {step for step, text in texts.items() if "retried(step" in text} == STEPS[name] - {FIRST[name]}


@EACH
def test_teardown_runs_whatever_happens_and_needs_no_other_step(name: str) -> None:
    task = documents(name)[0]["root"]["dag"]["tasks"]["teardown"]
    assert task["triggerPolicy"]["strategy"] == "ALL_UPSTREAM_TASKS_COMPLETED"
    given = {name: next(iter(value)) for name, value in task["inputs"]["parameters"].items()}
    assert {given[key] for key in ("config", "overrides", "run_name")} == {"componentInputParameter"}
    assert "taskOutputParameter" not in given.values()


@EACH
def test_first_step_and_teardown_get_the_same_kfp_run(name: str) -> None:
    ids = {
        tasks(name)[step]["inputs"]["parameters"]["kfp_run"]["runtimeValue"]["constant"]
        for step in ("teardown", FIRST[name])
    }
    assert ids == {"{{$.pipeline_job_uuid}}"}


def test_steps_run_in_order() -> None:
    before = {step: set(task.get("dependentTasks", [])) for step, task in tasks("post_training").items()}
    order = ["validate", "provision", "train", "evaluate", "register"]
    assert all(earlier in before[later] for earlier, later in pairwise(order))


@EACH
def test_form_can_be_sent_as_it_is(name: str) -> None:
    known = documents(name)[0]["root"]["inputDefinitions"]["parameters"]
    assert set(known) == (FORM | MORE[name]) - LESS[name]
    assert all("defaultValue" in spec and spec["parameterType"] == "STRING" for spec in known.values())
    assert all(spec["description"] for spec in known.values())


@EACH
def test_all_steps_use_the_image_of_the_form_and_install_nothing(name: str) -> None:
    spec, _ = documents(name)
    used = {executor["container"]["image"] for executor in spec["deploymentSpec"]["executors"].values()}
    assert used == {IMAGE_PARAMETER}
    assert spec["root"]["inputDefinitions"]["parameters"]["steps_image"]["defaultValue"] == tidemill_components.IMAGE
    assert tidemill_components.IMAGE.endswith(f"python:{tidemill.__version__}")
    assert "pip install" not in golden(name).read_text()


@EACH
def test_no_secret_is_in_a_pipeline_and_keys_come_by_reference(name: str) -> None:
    keys = [{"envVar": "TIDEMILL_S3_ACCESS_KEY", "secretKey": "access_key"}]
    keys += [{"envVar": "TIDEMILL_S3_SECRET_KEY", "secretKey": "secret_key"}]
    account = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
    for step, executor in executors(name).items():
        secret, login = executor["secretAsEnv"]
        # One that is missing must not keep the pod from starting: the step says so, and Kubernetes would wait.
        assert (secret["keyToEnv"], secret["optional"]) == (keys, True)
        assert secret["secretNameParameter"]["componentInputParameter"] in inputs_around(name, step)
        assert login["keyToEnv"] == [{"envVar": key, "secretKey": key} for key in account]
        assert (login["secretName"], login["optional"]) == ("tidemill-mlflow-login", True)
    spec = yaml.safe_dump(documents(name)[0])
    assert "TIDEMILL_S3" not in spec and "env:" not in spec


@EACH
def test_every_step_has_a_deadline_and_the_training_one_that_is_longer_than_its_cluster(name: str) -> None:
    deadlines = {step: int(executor["activeDeadlineSeconds"]) for step, executor in executors(name).items()}
    assert set(deadlines) == STEPS[name]
    assert deadlines.pop("train") >= KubernetesConfig().max_hours * 3600 + DAY
    assert max(deadlines.values()) <= DAY


@EACH
def test_pods_of_steps_are_restricted_found_and_not_evicted(name: str) -> None:
    for executor in executors(name).values():
        assert executor["securityContext"] == {"runAsUser": "1000", "runAsGroup": "1000", "runAsNonRoot": True}
        annotations = executor["podMetadata"]["annotations"]
        assert annotations == {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
        assert executor["podMetadata"]["labels"] == {"app.kubernetes.io/part-of": "tidemill"}
        paths = {env["name"]: env["fieldPath"] for env in executor["fieldPathAsEnv"]}
        assert paths["TIDEMILL_WORKFLOW"] == "metadata.labels['workflows.argoproj.io/workflow']"
        assert paths["TIDEMILL_KFP_RUN"] == "metadata.labels['pipeline/runid']"


@EACH
def test_every_step_asks_for_memory(name: str) -> None:
    containers = [e["container"]["resources"] for e in documents(name)[0]["deploymentSpec"]["executors"].values()]
    assert all(each["resourceMemoryRequest"] == each["resourceMemoryLimit"] == pods.MEMORY for each in containers)
    assert all(each["resourceCpuRequest"] for each in containers)


@EACH
def test_finished_workflow_is_deleted_with_what_it_owns(name: str) -> None:
    assert 0 < documents(name)[1]["pipelineConfig"]["resourceTtlOnCompletion"] <= 7 * DAY


@EACH
def test_only_artifacts_of_the_v2_api_are_used_and_the_model_is_one_of_them(name: str) -> None:
    spec, _ = documents(name)
    outputs = [c.get("outputDefinitions", {}).get("artifacts", {}) for c in spec["components"].values()]
    kinds = {artifact["artifactType"]["schemaTitle"] for each in outputs for artifact in each.values()}
    assert kinds == {"system.Markdown", "system.HTML", "system.Metrics", "system.Model"}


@EACH
def test_messages_have_the_fields_that_the_backend_reads(name: str) -> None:
    spec, platform = yaml.safe_load_all(golden(name).read_text(encoding="utf-8"))
    parsed = ParseDict(spec, PipelineSpec())
    ParseDict(platform, PlatformSpec())
    found = {step: ParseDict(executor, KubernetesExecutorConfig()) for step, executor in executors(name).items()}
    assert all(executor.active_deadline_seconds for executor in found.values())
    assert set(parsed.components) >= {f"comp-{step}" for step in found}


def test_condition_is_on_an_output_that_the_local_runner_finds() -> None:
    graphs = [
        component["dag"]["tasks"]
        for component in documents("continual")[0]["components"].values()
        if "dag" in component
    ]
    conditions = [
        task["triggerPolicy"]["condition"] for tasks in graphs for task in tasks.values() if "triggerPolicy" in task
    ]
    assert conditions == ["inputs.parameter_values['pipelinechannel--prepare-continual-Output'] == 'train'"]


@pytest.mark.parametrize("path", COMPONENTS, ids=lambda path: path.stem)
def test_component_is_a_signature_and_one_call(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    [function] = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    docstring, *rest = function.body
    imported = [node for node in rest if isinstance(node, ast.ImportFrom)]
    assert isinstance(docstring, ast.Expr) and ast.get_docstring(function)
    assert [node.module.partition(".")[0] for node in imported if node.module] == ["tidemill"] * len(imported)
    [*asked, call] = rest[len(imported) :]
    assert isinstance(call, ast.Return | ast.Expr)
    assert [type(node) for node in asked] in ([], [ast.Assign])


@pytest.mark.parametrize("path", COMPONENTS, ids=lambda path: path.stem)
def test_component_module_imports_only_the_standard_library_and_kfp(path: Path) -> None:
    tops = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            tops |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            tops.add(node.module.partition(".")[0])
    assert tops - set(sys.stdlib_module_names) <= {"kfp", "tidemill_components"}


def test_pipeline_imports_without_the_engine() -> None:
    build = "from tidemill_pipelines.catalogue import PIPELINES, pipeline_of; [pipeline_of(name) for name in PIPELINES]"
    code = f"import sys; {build}; print('tidemill' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.split() == ["False", "False"]


@EACH
def test_pipeline_is_built_alone(name: str) -> None:
    """KFP takes a second to build each, and a user waits for it at every command."""
    code = (
        f"import sys; from tidemill_pipelines.catalogue import pipeline_of; pipeline_of({name!r}); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    built = {each.removeprefix("tidemill_pipelines.") for each in done.stdout.split()}
    assert built & set(PIPELINES) == {name}
