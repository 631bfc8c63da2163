"""What KFP's log shows of a step that failed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tidemill.steps.refusal import WIDTH

STEP = """
from tidemill.errors import ConfigError, RunError
from tidemill.steps.refusal import explained

@explained()
def step():
    {body}

step()
"""


def log_of(body: str) -> list[str]:
    """The log of a process that ends with an error of its step."""
    script = STEP.format(body=body)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    return done.stderr.strip().splitlines()


def raised(error: str) -> str:
    """A step whose error has a cause."""
    return "\n".join(["try: 1 / 0", f"    except Exception as cause: raise {error} from cause"])


def test_refusal_is_its_sentence_in_short_lines_without_a_traceback() -> None:
    lines = log_of(raised("ConfigError('trainer.steps', 0, 'an integer ' + 'of at least 1 ' * 20, 'Correct it.')"))
    assert lines[0].startswith("trainer.steps = 0. Allowed:") and lines[-1].endswith("Correct it.")
    assert len(lines) > 2 and max(map(len, lines)) <= WIDTH


@pytest.mark.parametrize(
    ("body", "sentence"),
    [("1 / 0", "ZeroDivisionError: division by zero"), (raised("RunError('an actor died')"), "an actor died")],
)
def test_traceback_of_another_error_is_below_its_sentence(body: str, sentence: str) -> None:
    lines = log_of(body)
    assert lines[0] == sentence
    assert lines[2].startswith("Traceback") and lines[-1].endswith(sentence)
