"""What may import what, as the layout promises."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "ray", "vllm", "kfp", "mlflow")

# Lowest first: a package imports only from itself and from those above it in this list.
PACKAGES = (
    "tidemill",  # errors, records, protocols: what crosses a boundary
    "tidemill.config",
    "tidemill.observe",
    "tidemill.store",
    "tidemill.tracking",
    "tidemill.models",
    "tidemill.weights",
    "tidemill.inference",
    "tidemill.queue",
    "tidemill.rollout",
    "tidemill.train",
    "tidemill.cluster",
    "tidemill.actors",
    "tidemill.driver",
    "tidemill.kuberay",
    "tidemill.steps",
    "tidemill.verl",
    "tidemill_components",
    "tidemill_pipelines",
    "tidemill.local",
    "tidemill.cli",
)
RANK = {package: rank for rank, package in enumerate(PACKAGES)}

# Mathematics and rules: they need no runtime.
PURE = (
    "tidemill.config",
    "tidemill.errors",
    "tidemill.records",
    "tidemill.protocols",
    "tidemill.fakes",
    "tidemill.queue",
    "tidemill.rollout.ordering",
    "tidemill.rollout.ledger",
    "tidemill.rollout.staleness",
    "tidemill.train.advantages",
    "tidemill.train.batch",
    "tidemill.train.losses",
    "tidemill.train.packing",
)

# Where a library may be imported at all.
HOMES = {
    "vllm": ("tidemill.inference",),
    "kfp": ("tidemill_components", "tidemill_pipelines"),
    "kfp_server_api": ("tidemill_pipelines",),
    "ray": ("tidemill.actors", "tidemill.cluster", "tidemill.driver"),
    "matplotlib": ("tidemill.observe.charts",),
    "mlflow": ("tidemill.tracking",),
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


def package(module: str) -> str:
    """The package that a module stands in."""
    path = MODULES[module]
    return module if path.name == "__init__.py" else module.rpartition(".")[0]


@pytest.mark.parametrize("module", ["tidemill.config", "tidemill.records", "tidemill.cli.main"])
def test_contract_modules_import_without_heavy_libraries(module: str) -> None:
    code = f"import sys, {module}; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.split() == []


def test_every_package_has_a_place() -> None:
    assert sorted({package(module) for module in MODULES}) == sorted(PACKAGES)


def test_the_architecture_page_lists_the_packages_in_this_order() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    listed = re.findall(r"^  (\w+)/ ", page, re.MULTILINE)
    assert listed == [package.removeprefix("tidemill.") for package in PACKAGES if package.startswith("tidemill.")]


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downwards(module: str) -> None:
    own = RANK[package(module)]
    assert [other for other in imports(MODULES[module]) if other in MODULES and RANK[package(other)] > own] == []


@pytest.mark.parametrize("module", [module for module in MODULES if starts_with(module, PURE)])
def test_pure_modules_import_no_runtime(module: str) -> None:
    heavy = {"ray", "vllm", "kfp", "mlflow"} | ({"torch"} if starts_with(module, ("tidemill.config",)) else set())
    assert {name.partition(".")[0] for name in imports(MODULES[module])} & heavy == set()


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
