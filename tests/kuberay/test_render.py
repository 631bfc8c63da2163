from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from manifest_rig import APART, EXAMPLE, on_kubernetes

from tidemill.cli.main import main
from tidemill.kuberay.manifest import ray_job
from tidemill.kuberay.render import manifests

COMPILE = ["compile", "--manifests", str(EXAMPLE), *APART]


def test_manifests_are_printed_as_they_would_be_sent(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMPILE, "kubernetes.namespace=research"]) == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed) == ray_job(on_kubernetes("kubernetes.namespace=research"), 1)
    assert "system_prompt: You are a calculator.\n" in printed  # the settings can be read, too


def test_manifests_can_be_written_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    assert main([*COMPILE, "--output", str(path)]) == 0
    assert path.read_text(encoding="utf-8") == manifests(on_kubernetes())
    assert capsys.readouterr().out == f"wrote {path}\n"


def test_what_must_be_there_already_stands_above() -> None:
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
        "# In namespace research there must be:",
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
        (["compile", "--manifests", str(EXAMPLE)], "cluster.provider = 'local': allowed is kuberay"),
        (["compile", "trainer.steps=3"], "override = 'trainer.steps=3': allowed is nothing without --manifests"),
        ([*COMPILE, "--check", "a.yaml"], "--check = 'a.yaml': allowed is nothing with --manifests"),
        ([*COMPILE, "--pipeline", "sweep"], "--pipeline = 'sweep': allowed is nothing with --manifests"),
        ([*COMPILE, "--output", "/nowhere/a.yaml"], "output = '/nowhere/a.yaml': allowed is a file that can be"),
        ([*COMPILE, "kubernetes.tolerations=[{operater: Exists}]"], "tolerations[1].operater = 'Exists'"),
        ([*COMPILE, "kubernetes.image=tidemill:latest"], "kubernetes.image = 'tidemill:latest'"),
    ],
)
def test_what_cannot_be_shown_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
