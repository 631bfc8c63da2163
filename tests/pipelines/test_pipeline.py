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

import tidemill
from tidemill.cli import main

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "pipelines/compiled/post_training.yaml"
COMPONENTS = sorted(path for path in (ROOT / "components").glob("*.py") if path.stem != "__init__")
STEPS = ["evaluate", "provision", "register", "teardown", "train", "validate"]
SPEC: dict[str, Any]
SPEC, PLATFORM = yaml.safe_load_all(GOLDEN.read_text(encoding="utf-8"))
IMAGE_PARAMETER = "{{$.inputs.parameters['pipelinechannel--steps_image']}}"


def tasks() -> dict[str, dict[str, Any]]:
    """Every task of the compiled pipeline by name, also those inside the exit handler."""
    dags = [SPEC["root"]["dag"], *(c["dag"] for c in SPEC["components"].values() if "dag" in c)]
    return {name: task for dag in dags for name, task in dag["tasks"].items()}


def test_compiled_pipeline_is_current() -> None:
    assert main(["compile", "--check", str(GOLDEN)]) == 0


def test_stale_pipeline_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stale = tmp_path / "old.yaml"
    stale.write_text(GOLDEN.read_text().replace("post-training", "pre-training"))
    assert main(["compile", "--check", str(stale)]) == 1
    assert "out of date" in capsys.readouterr().err


def test_compile_writes_the_golden_pipeline(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.yaml"
    assert main(["compile", "--output", str(path)]) == 0
    assert path.read_text() == GOLDEN.read_text()


def test_compile_into_a_missing_folder_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--output", str(tmp_path / "none/pipeline.yaml")]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_every_step_is_a_component() -> None:
    assert set(STEPS) <= {path.stem for path in COMPONENTS}
    assert {name for name in tasks() if name != "exit-handler-1"} == set(STEPS)


def test_nothing_is_cached() -> None:
    assert [name for name, task in tasks().items() if name in STEPS and task["cachingOptions"]] == []


def test_only_steps_that_may_be_repeated_are_retried() -> None:
    retried = {name for name, task in tasks().items() if "retryPolicy" in task}
    assert retried == {"provision", "train", "evaluate", "register"}


def test_teardown_runs_whatever_happens_and_needs_no_other_step() -> None:
    task = SPEC["root"]["dag"]["tasks"]["teardown"]
    assert task["triggerPolicy"]["strategy"] == "ALL_UPSTREAM_TASKS_COMPLETED"
    given = {name: next(iter(value)) for name, value in task["inputs"]["parameters"].items()}
    assert {given[name] for name in ("config", "overrides", "run_name")} == {"componentInputParameter"}
    assert given["kfp_run"] == "runtimeValue"
    assert "taskOutputParameter" not in given.values()


def test_steps_run_in_order() -> None:
    dag = SPEC["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    before = {name: set(task.get("dependentTasks", [])) for name, task in dag.items()}
    order = ["validate", "provision", "train", "evaluate", "register"]
    assert all(earlier in before[later] for earlier, later in pairwise(order) if later != "train")
    assert before["train"] == {"validate", "provision"}


def test_all_steps_use_one_image_of_this_version_and_install_nothing() -> None:
    executors = SPEC["deploymentSpec"]["executors"].values()
    assert {executor["container"]["image"] for executor in executors} == {IMAGE_PARAMETER}
    assert SPEC["root"]["inputDefinitions"]["parameters"]["steps_image"]["defaultValue"] == tidemill_components.IMAGE
    assert f":{tidemill.__version__}-" in tidemill_components.IMAGE
    assert "pip install" not in GOLDEN.read_text()


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
    code = "import sys, tidemill_pipelines.post_training; print('tidemill' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["False", "False"]
