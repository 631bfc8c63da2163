"""What may import what, as the layout promises."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "ray", "vllm", "kfp", "mlflow")

# Lowest first: a module may import from its own layer and from those below. The longest matching prefix counts.
LAYERS = (
    ("tidemill", "tidemill.chatter", "tidemill.errors", "tidemill.records"),
    (
        "tidemill.address",
        "tidemill.sections",
        "tidemill.effects",
        "tidemill.config",
        "tidemill.run_file",
        "tidemill.failure",
        "tidemill.task_group",
        "tidemill.verl",
    ),
    (
        "tidemill.protocols",
        "tidemill.rollout.deferral",
        "tidemill.rollout.staleness",
        "tidemill.rollout.ledger",
        "tidemill.train.advantages",
        "tidemill.train.losses",
        "tidemill.train.batch",
        "tidemill.train.correction",
        "tidemill.train.tree",
    ),
    (
        "tidemill.cluster",
        "tidemill.kuberay",
        "tidemill.observe",
        "tidemill.queue",
        "tidemill.rollout",
        "tidemill.store",
        "tidemill.sync",
        "tidemill.train",
        "tidemill.fakes",
    ),
    ("tidemill.actors",),
    ("tidemill.run",),
    ("tidemill.pipeline",),
    ("tidemill.job", "tidemill.local"),
    ("tidemill.command",),
    ("tidemill.cli",),
    ("tidemill_components",),
    ("tidemill_pipelines",),
)
RANK = {prefix: rank for rank, layer in enumerate(LAYERS) for prefix in layer}
PURE = LAYERS[0] + LAYERS[1] + LAYERS[2]

# Where a library may be imported at all.
HOMES = {
    "vllm": ("tidemill.rollout.engine", "tidemill.rollout.generate", "tidemill.sync"),
    "kfp": ("tidemill_components", "tidemill_pipelines"),
    "kfp_server_api": ("tidemill_pipelines",),
    "ray": ("tidemill.actors", "tidemill.cluster", "tidemill.run"),
    "mlflow": ("tidemill.store",),
    "minio": ("tidemill.store",),
    "kubernetes": ("tidemill.kuberay",),
}


def modules() -> dict[str, Path]:
    """Module name to file, for everything that is shipped."""
    found = {}
    for folder, package in (
        ("tidemill", "tidemill"),
        ("components", "tidemill_components"),
        ("pipelines", "tidemill_pipelines"),
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


MODULES = modules()


def imports(path: Path, *, module_level: bool = False) -> Iterator[str]:
    """Modules that a file imports, also inside functions; `from a import b` counts as a.b where that is a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if module_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else node.module


def starts_with(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


def rank(module: str) -> int:
    """Layer of a module, by its longest known prefix."""
    parts = module.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next(RANK[prefix] for prefix in prefixes if prefix in RANK)


@pytest.mark.parametrize("module", ["tidemill.config", "tidemill.records", "tidemill.cli"])
def test_contract_modules_import_without_heavy_libraries(module: str) -> None:
    code = f"import sys, {module}; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.split() == []


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downwards(module: str) -> None:
    upwards = [other for other in imports(MODULES[module]) if other in MODULES and rank(other) > rank(module)]
    assert upwards == []


def test_every_module_has_a_layer_of_its_own_name() -> None:
    unplaced = [module for module in MODULES if module != "tidemill" and rank(module) == RANK["tidemill"]]
    assert sorted(unplaced) == [
        "tidemill.chatter",
        "tidemill.errors",
        "tidemill.records",
    ]


@pytest.mark.parametrize("module", [module for module in MODULES if starts_with(module, PURE[1:])])
def test_pure_modules_import_no_runtime(module: str) -> None:
    assert {name.partition(".")[0] for name in imports(MODULES[module])} & {"ray", "vllm", "kfp", "mlflow"} == set()


@pytest.mark.parametrize("library", HOMES)
def test_library_is_imported_only_where_it_belongs(library: str) -> None:
    users = [m for m, path in MODULES.items() if library in {name.partition(".")[0] for name in imports(path)}]
    assert [module for module in users if not starts_with(module, HOMES[library])] == []


def test_no_module_is_named_utils() -> None:
    vague = {"utils", "util", "helpers", "misc", "common"}
    assert [module for module in MODULES if vague & set(module.split("."))] == []


def test_modules_do_not_import_each_other() -> None:
    graph = {m: {o for o in imports(p, module_level=True) if o in MODULES and o != m} for m, p in MODULES.items()}
    while leaves := [module for module, others in graph.items() if not others & graph.keys()]:
        for module in leaves:
            del graph[module]
    assert graph == {}


def test_every_package_is_in_the_wheel() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(packages) == sorted(module for module, path in MODULES.items() if path.name == "__init__.py")
