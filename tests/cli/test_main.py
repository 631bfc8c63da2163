from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cli_rig import COMMANDS, parsed

from tidemill import __version__
from tidemill.cli.main import main
from tidemill.errors import ConfigError

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples/addition.yaml")


def test_help_names_every_command_and_comes_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tidemill.cli.main", "--help"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert all(f"\n  {name} " in done.stdout for name in COMMANDS)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert imported & {"numpy", "pydantic", "torch", "ray", "kfp", "mlflow", "rich"} == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_has_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "-h"]) == 0
    short = capsys.readouterr().out
    assert f"\n  tidemill {name}" in short
    assert main([name, "--help"]) == 0
    assert capsys.readouterr().out == short


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tidemill {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", EXAMPLE, "trainer.stepz=3"], "trainer.stepz = 3. Allowed: one of the keys steps"),
        (["run", "nowhere.yaml"], "nowhere.yaml"),
        (["run"], "file = null. Allowed: a run file, or --resume NAME"),
        (["run", "--resume", "addition-9"], "resume = 'addition-9'"),
        (["run", EXAMPLE, "--resume", "addition-9"], "a file or --resume, not both"),
        (["run", EXAMPLE, "--output", "a", "output=b"], "output = 'a'. Allowed: either --output or output="),
        (["train", EXAMPLE, "trainer.steps=0"], "trainer.steps = 0"),
        (["evaluate", EXAMPLE, "data.held_out=null", "registry.min_score=null", "evaluation.every=0"], "data.held_out"),
        (["timeline", "nowhere"], "RUN = 'nowhere'. Allowed: a run below runs/, or its folder"),
        (["ui", "--output", "nowhere"], "nowhere'. Allowed: a folder of runs with mlflow.db"),
    ],
)
def test_misuse_is_one_line_and_status_2(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("tidemill: ") and message in error
    assert error.count("\n") == 1


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(ConfigError):
        main(["--debug", "run", EXAMPLE, "trainer.stepz=3"])


def test_settings_may_stand_around_the_options() -> None:
    arguments = parsed(["run", "a.yaml", "seed=1", "--output", "here", "seed=2", "--resume", "b", "seed=3"])
    assert (arguments["file"], arguments["overrides"]) == ("a.yaml", ["seed=1", "seed=2", "seed=3"])
    assert (arguments["output"], arguments["resume"]) == ("here", "b")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluat"], "No such command 'evaluat'. Did you mean 'evaluate'?"),
        (["--stepz"], "No such option: --stepz"),
        (["run", "a.yaml", "--resume", "b", "--stepz"], "No such option: --stepz"),
        (["run", "a.yaml", "--trainer.steps=2"], "--trainer.steps. A setting has no dashes: trainer.steps=2."),
        (["run", "a.yaml", "--output"], "Option '--output' requires an argument."),
        (["run", "a.yaml", "--output", "--resume", "b"], "Option '--output' requires an argument."),
        (["submit", "a.yaml", "--dry-run=yes"], "Option '--dry-run' does not take a value."),
        (["stop", "a", "--reason", " "], "'--reason': it is empty."),
        (["ui", "more"], "Got unexpected extra argument(s) (more)"),
        (["ui", "--port", "many"], "Invalid value for '--port'"),
        (["train"], "Missing argument 'FILE'."),
        (["compile", "--pipeline", "all"], "'all' is not one of 'post_training', 'sweep', 'continual'."),
    ],
)
def test_usage_error_is_one_line_that_names_the_help(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    command = f"tidemill {words[0]}" if words[0] in COMMANDS else "tidemill"
    assert error.startswith("tidemill: ") and error.endswith(f" See `{command} --help`.\n")


def test_words_after_two_dashes_are_no_options() -> None:
    assert parsed(["generate", "model", "--", "--output", "--a=b"])["prompts"] == ["--output", "--a=b"]
    assert parsed(["generate", "model", "hello", "--system", "--a=b"])["system"] == "--a=b"


def test_no_command_at_all_shows_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    error = capsys.readouterr().err
    assert [name for name in COMMANDS if f"\n  {name} " not in error] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-new-tokens", "0", "hello"], "'--max-new-tokens': Input should be greater than or equal to 1"),
        (["--max-new-tokens", "many", "hello"], "'--max-new-tokens': Input should be a valid integer"),
        (["--temperature", "-1", "hello"], "'--temperature': -1.0 is not a finite number of at least 0"),
        (["--temperature", "nan", "hello"], "'--temperature': nan is not a finite number"),
        ([" "], "'PROMPT': it is empty"),
    ],
)
def test_answers_that_cannot_be_asked_for_are_refused_at_once(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "model", *words]) == 2
    assert message in capsys.readouterr().err
