from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_model import CONTEXT, make_tiny_model

from tidemill.cli.local import free_port, output_override
from tidemill.cli.main import main
from tidemill.config.reading import load_config
from tidemill.errors import ConfigError
from tidemill.observe.events import Activity, EventLog
from tidemill.steps.run_folder import prepare_folder

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples/addition.yaml")


@pytest.mark.parametrize("name", ["status", "logs", "stop"])
def test_run_of_this_machine_is_not_looked_for_on_a_cluster(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    prepare_folder(load_config(EXAMPLE, ["name=addition-1", "output=runs"]))
    assert main([name, "addition-1"]) == 2
    error = capsys.readouterr().err
    assert "RUN = 'addition-1'. Allowed: a run on Kubernetes. runs/addition-1 is a run of this machine" in error
    assert error.endswith(" Ctrl-C in the terminal that started it stops it.\n")


@pytest.mark.parametrize("setting", ["data.held_out=gone.jsonl", "rewards.0.function=exact_numbr"])
def test_inputs_are_looked_at_before_a_model_is_scored(setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", EXAMPLE, setting, "model=s3://nowhere/that/is/asked"]) == 1
    assert setting.partition("=")[2] in capsys.readouterr().err


def test_run_that_may_begin_is_told_and_none_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", EXAMPLE, f"output={tmp_path / 'runs'}"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{EXAMPLE}: no errors in what was checked"
    assert list(tmp_path.iterdir()) == []


def test_settings_that_may_not_be_meant_so_are_told_before_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["data.held_out=addition_train.jsonl", "trainer.steps=9", "trainer.warmup_steps=90"]
    assert main(["check", EXAMPLE, f"output={tmp_path / 'runs'}", *settings]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith(EXAMPLE)]
    parts = ("data.held_out names", "trainer.warmup_steps = 90", "evaluation.every = 10", "checkpoint.every = 15")
    assert all(part in line for part, line in zip(parts, told[:4], strict=True))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.held_out=gone.jsonl", "gone.jsonl"),
        ("rewards.0.function=exact_numbr", "exact_numbr"),
        ("model=./no-such-model", "no-such-model"),
        ("rollout.engines=100000", "not enough memory"),
        ("output=/dev/null/runs", "output = '/dev/null/runs'. Allowed: a folder that can be made and written to"),
        ("store.endpoint=http://127.0.0.1:1", "127.0.0.1:1"),
        ("tracking.uri=http://127.0.0.1:1", "tracking.uri = 'http://127.0.0.1:1'"),
        (
            "{provider: kuberay}",
            "cluster.provider = 'kuberay'. Allowed: local or existing: "
            "this command checks this machine, not a cluster. "
            f"`tidemill submit {EXAMPLE} --dry-run` checks a run for a cluster.",
        ),
    ],
)
def test_run_that_cannot_succeed_is_found_without_starting_it(
    setting: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TIDEMILL_S3_ACCESS_KEY", "a")
    monkeypatch.setenv("TIDEMILL_S3_SECRET_KEY", "b")
    pods = ["sync.transport=object_store", "store.endpoint=http://store:9000", "tracking.uri=http://mlflow:5000"]
    settings = [f"cluster={setting}", *pods] if setting.startswith("{") else [setting]
    assert main(["check", EXAMPLE, f"output={tmp_path / 'runs'}", *settings]) in (1, 2)
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["check", "train", "evaluate"])
def test_reward_of_the_working_directory_is_found_by_the_installed_command(command: str, tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text("def score(response, *, prompt, answer, extra): return 1.0\n")
    script = "import sys; sys.path.remove(''); from tidemill.cli.main import main; sys.exit(main(sys.argv[1:]))"
    words = [command, EXAMPLE, "rewards.0.function=my_rewards:score", "model=nowhere"]
    done = subprocess.run(
        [sys.executable, "-c", script, *words], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert "model 'nowhere': there is no such folder" in done.stderr


def test_model_that_is_not_there_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tmp_path / "nothing"), "hello", "--output", str(tmp_path)]) == 1
    out, error = capsys.readouterr()
    assert out == "" and error.splitlines()[0] == f"loading {tmp_path / 'nothing'} ..."
    assert "there is no such folder" in error.splitlines()[1]


def test_registry_that_is_not_there_is_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "models:/addition/1", "hello", "--output", str(tmp_path)]) == 2
    assert "mlflow.db" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_port_in_use_is_refused_with_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"port = \d+. Allowed: a free port.*--port"):
            free_port(taken.getsockname()[1])


@pytest.mark.parametrize("port", [-1, 65536])
def test_port_that_is_none_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match=f"port = {port}. Allowed: a number from 0 to 65535"):
        free_port(port)


def test_any_port_is_found_for_zero() -> None:
    assert free_port(0) > 0


def test_file_that_cannot_be_written_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write(Activity(1, [("update_actor", 0.0, 1.0)], {"engine 0": [(0.0, 1.0)]}))
    (tmp_path / "folder.svg").mkdir()
    for command in (["compile"], ["timeline", str(tmp_path)]):
        assert main([*command, "--output", str(tmp_path / "folder.svg")]) == 2
        error = capsys.readouterr().err
        assert "--output = " in error and error.count("\n") == 1


def test_pipeline_may_have_any_name_of_a_file(tmp_path: Path) -> None:
    assert main(["compile", "--output", str(tmp_path / "a.txt")]) == 0
    golden = ROOT / "pipelines/compiled/post_training.yaml"
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == golden.read_text(encoding="utf-8")


def test_answer_beyond_the_context_is_refused_in_the_words_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny_model(tmp_path, 0)
    assert main(["generate", str(tmp_path), "w5 w6 w7", "--max-new-tokens", str(CONTEXT)]) == 2
    assert f"--max-new-tokens = {CONTEXT}. Allowed: at most {CONTEXT - 3}: the model's" in capsys.readouterr().err
    assert main(["generate", str(tmp_path), "w5 " * CONTEXT]) == 2
    assert f"PROMPT = '{CONTEXT} tokens'. Allowed: less than the model's" in capsys.readouterr().err


@pytest.mark.slow
def test_several_prompts_stand_above_their_answers(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, 0)
    prompts = ["w5 " * 15 + "w5", "w6 " * 15 + "w6"]  # vLLM's CPU build dies of a prompt of one token where it has AMX
    command = [sys.executable, "-m", "tidemill.cli.main", "generate", str(tmp_path), *prompts, "--max-new-tokens", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert re.fullmatch("".join(rf"> {prompt}\n\S+ \S+\n\n" for prompt in prompts), done.stdout)


def test_output_is_a_setting_of_a_new_run() -> None:
    assert output_override("1e3: #x", ["seed=1"]) == ['output="1e3: #x"']
    assert output_override(None, ["output=b"]) == []


def test_output_of_a_new_run_is_where_it_is_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "there").write_text("a file")
    assert main(["run", EXAMPLE, "--output", str(tmp_path / "there")]) == 1
    assert str(tmp_path / "there") in capsys.readouterr().err


QUIET = """
import os, subprocess, sys
from tidemill.cli.local import quiet
try:
    with quiet({debug}):
        print("noise", flush=True)
        subprocess.run(["sh", "-c", "echo noise; echo noise >&2"])
        if {fail}:
            raise ValueError
except ValueError:
    print("why", file=sys.stderr)
print("answer")
"""


def said(*, debug: bool, fail: bool) -> tuple[str, str]:
    script = QUIET.format(debug=debug, fail=fail)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    return done.stdout, done.stderr


def test_output_of_libraries_and_their_processes_is_hidden() -> None:
    assert said(debug=False, fail=False) == ("answer\n", "")


def test_errors_are_shown_after_hidden_output() -> None:
    assert said(debug=False, fail=True) == ("answer\n", "why\n")


def test_debug_shows_the_output_of_libraries() -> None:
    assert said(debug=True, fail=False) == ("noise\nnoise\nanswer\n", "noise\n")
