"""The script that lets KFP retry steps that fail, with a kubectl that reads and writes a file."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import yaml
from kustomize_rig import K8S

SCRIPT = K8S / "operators/kubeflow/retry_failed_steps.sh"
DEFAULTS = {
    "spec": {
        "ttlStrategy": {"secondsAfterSuccess": 3600, "secondsAfterFailure": 3600},
        "templateDefaults": {"retryStrategy": {"limit": 2, "retryPolicy": "OnError"}},
    }
}
KUBECTL = """#!/bin/sh
case "$*" in
  "--namespace kfp get configmap workflow-controller-configmap --output yaml") cat "$OBJECT" ;;
  "replace --filename -") cat > "$OBJECT.new" && mv "$OBJECT.new" "$OBJECT" && echo replaced ;;
  *) exit 9 ;;
esac
"""


def test_only_the_policy_of_retries_changes(tmp_path: Path) -> None:
    path = tmp_path / "object.yaml"
    data = {"executor": "imagePullPolicy: IfNotPresent\n", "workflowDefaults": yaml.safe_dump(DEFAULTS)}
    path.write_text(yaml.safe_dump({"kind": "ConfigMap", "data": data}))
    (tmp_path / "kubectl").write_text(KUBECTL)
    (tmp_path / "kubectl").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OBJECT": str(path)}
    said = [subprocess.check_output([SCRIPT, "kfp"], env=env, text=True, timeout=60) for _ in range(2)]
    changed = yaml.safe_load(path.read_text())
    defaults = yaml.safe_load(changed["data"].pop("workflowDefaults"))
    assert defaults["spec"].pop("templateDefaults") == {"retryStrategy": {"limit": 2, "retryPolicy": "Always"}}
    assert defaults["spec"] == {"ttlStrategy": DEFAULTS["spec"]["ttlStrategy"]}
    assert changed == {"kind": "ConfigMap", "data": {"executor": data["executor"]}}
    assert said[0] == "replaced\n"
    assert said[1].endswith("nothing to change\n")
