"""A whole pipeline in the KFP local runner in seconds: training and evaluation are stubs, everything else is real.

Every step is a process of its own, so Python loads the stubs at its start: `sitecustomize` on its path replaces
the two modules that need Ray and vLLM.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml
from tiny_model import make_tiny_model

from tidemill.store.seaweedfs import find_server
from tidemill.store.server import store_folder

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 1100
STUBS = '''
import os, sys, types
from pathlib import Path

def module(name, **members):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(members)

def train(config, claim=None, *, score_last=False):
    """A training that exports the model that it started from; its score is the learning rate times a thousand."""
    from tidemill.errors import EngineError, RewardError
    from tidemill.observe.report import Sample, Summary
    from tidemill.models.locate import fetch_model
    from tidemill.store.server import open_store
    from tidemill.tracking.tracker import Tracker
    tries = Path(os.environ["RIG"]) / f"{config.name}.tries"
    tries.write_text(str(int(tries.read_text()) + 1 if tries.exists() else 1))
    if config.seed == 13:
        raise RewardError("the reward is broken")
    if config.seed == 7 and tries.read_text() == "1":
        raise EngineError("an engine died")
    if config.seed == 9 and tries.read_text() == "1":
        os.kill(os.getpid(), 9)
    tracker = Tracker.start(config)
    for step in (1, 2, 3):
        tracker.log(step, {"reward/mean": step / 4})
    tracker.log(0, {"evaluation/score": 0.25})
    tracker.finish("FINISHED")
    prefix = f"runs/{config.name}/model/3"
    with open_store(config.store, config.output) as store:
        store.upload_folder(fetch_model(config).path, prefix)
        uri = store.uri(prefix)
    return Summary(3, 0.25, None, 1.0, 1.0, 10.0, 0.1, 0.1, 1, None, None, uri, None, tracker.run_id,
                   samples=(Sample("w5 w6", "w9", None, "7"),))

async def evaluate_model(config, path):
    from tidemill.protocols import Answer, Evaluation
    assert (Path(path) / "config.json").is_file()
    value = config.trainer.learning_rate * 1000
    return Evaluation(0, value, (Answer("w5 w6", "w7", "7", value), Answer("w8", "w7", "9", value)), {})

module("tidemill.driver.run", train=train)
module("tidemill.rollout.offline", evaluate_model=evaluate_model)
'''


@dataclass(frozen=True)
class Rig:
    """A folder with settings, prompts and a tiny model, in which pipelines run.

    Attributes:
        folder: working directory; runs are below `runs`.
    """

    folder: Path

    @classmethod
    def make(cls, folder: Path, empty_mlflow: Path) -> Rig:
        """A folder with everything that a run needs, including MLflow's tables."""
        (folder / "site").mkdir()
        (folder / "runs").mkdir()
        shutil.copy(empty_mlflow, folder / "runs/mlflow.db")
        (folder / "site/sitecustomize.py").write_text(STUBS)
        rows = [json.dumps({"prompt": "w5 w6", "answer": "7"}), json.dumps({"prompt": "w8", "answer": "9"})]
        for name in ("train", "held_out"):
            (folder / f"{name}.jsonl").write_text("\n".join(rows))
        settings = {
            "name": "tiny",
            "model": str(make_tiny_model(folder / "model", 0)),
            "output": str(folder / "runs"),
            "data": {"train": "train.jsonl", "held_out": "held_out.jsonl", "max_prompt_tokens": 8},
            "rewards": [{"function": "exact_number"}],
            "rollout": {"group_size": 2, "max_new_tokens": 4, "dtype": "float32"},
            "trainer": {"steps": 3, "ppo_mini_batch_size": 2, "learning_rate": 0.0005},
        }
        (folder / "run.yaml").write_text(yaml.safe_dump(settings))
        return cls(folder)

    def run(self, pipeline: str, **parameters: str) -> subprocess.CompletedProcess[str]:
        """Run a pipeline to its end, without a pause between retries."""
        given = [f"{name}={value}" for name, value in {"config": "run.yaml", **parameters}.items()]
        path = os.pathsep.join([str(self.folder / "site"), os.environ.get("PYTHONPATH", "")])
        code = (
            "import sys; from tidemill_pipelines import tasks; tasks.BACKOFF = '0s'; "
            "from tidemill_pipelines.local import main; main(*sys.argv[1:])"
        )
        command = [sys.executable, "-c", code, pipeline, str(self.folder / "kfp"), *given]
        environment = os.environ | {"PYTHONPATH": path, "RIG": str(self.folder)}
        return subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    def tries(self, run: str) -> int:
        """How often the training of a run was started."""
        path = self.folder / f"{run}.tries"
        return int(path.read_text()) if path.exists() else 0

    def output(self, task: str, name: str) -> str:
        """An output of a task of the newest run of a pipeline."""
        found = max(
            (self.folder / "kfp").glob(f"*/**/{task}/executor_output.json"), key=lambda path: path.stat().st_mtime
        )
        parameters: dict[str, str] = json.loads(found.read_text()).get("parameterValues", {})
        return parameters[name] if name in parameters else (found.parent / name).read_text()

    @property
    def store_is_up(self) -> bool:
        """Whether the S3 server of a run is still running."""
        return find_server(store_folder(self.folder / "runs")) is not None
