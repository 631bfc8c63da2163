from __future__ import annotations

import re
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from rollout_rig import CharTokenizer

from tidemill.config.data import DataConfig, RewardConfig
from tidemill.errors import RewardError
from tidemill.rollout.prompts import PromptSet
from tidemill.rollout.reward_pool import columns_of
from tidemill.rollout.rewards import BUILT_IN, Response, apply, as_parts, overlong, resolve
from tidemill.rollout.sources import load_rows


def reward(name: str, response: str, answer: str | None, **extra: Any) -> float:
    value = BUILT_IN[name](response, prompt="", answer=answer, extra=extra)
    assert isinstance(value, float)
    return value


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("7", "7", 1.0),
        ("The answer is 7.", "7", 1.0),
        ("7 or 8", "8", 0.0),
        ("1,234 apples", "1234", 1.0),
        ("1,2,3", "1", 1.0),
        ("x = -3", "-3", 1.0),
        ("\N{MINUS SIGN}3", "-3", 1.0),
        ("3.50", "3.5", 1.0),
        ("17", "1", 0.0),
        ("none", "7", 0.0),
        ("", "7", 0.0),
    ],
)
def test_exact_number_takes_the_first_number(response: str, answer: str, expected: float) -> None:
    assert reward("exact_number", response, answer) == expected


@pytest.mark.parametrize(("answer", "message"), [(None, "no reference answer"), ("seven", "is not a number")])
def test_exact_number_refuses_a_row_it_cannot_judge(answer: str | None, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        reward("exact_number", "7", answer)


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [(r"so \boxed{\frac{1}{2}}", "0.5", 1.0), ("$x^2 + 2x + 1$", "(x+1)^2", 1.0), ("3", "4", 0.0), ("", "4", 0.0)],
)
def test_math_verify_judges_in_any_thread(response: str, answer: str, expected: float) -> None:
    found: list[float] = []
    thread = Thread(target=lambda: found.append(reward("math_verify", response, answer)))
    thread.start()
    thread.join(60)
    assert found == [expected]


LATEX_PAIRS = [  # reference answer, a right response, a wrong response
    (r"2\sqrt{3}", r"The answer is \boxed{2\sqrt{3}}.", "The answer is 2."),
    (r"11\sqrt2", r"\boxed{11\sqrt{2}}", "11"),
    ("3, 5, 7", r"\boxed{3, 5, 7}", "The answer is 7"),
    ("6 - 5i", r"\boxed{6 - 5i}", "5"),
    ("2^{10}", r"\boxed{1024}", "2"),
    ("1e-3", r"\boxed{0.001}", "1"),
    ("0.001", r"so \boxed{1e-3}", r"\boxed{-3 + e}"),
    ("1E5", "100000", "1"),
    ("2.5e-9", r"$2.5 \times 10^{-9}$", r"\boxed{2.6 \times 10^{-9}}"),
    (r"\frac{1}{2}", r"\boxed{\frac12}", "2"),
    (r"\frac{1}{2}\sqrt{3}", r"$\frac{\sqrt3}{2}$", "1/2"),
    (r"\frac{3\pi}{4}", r"\boxed{0.75\pi}", "3/4"),
    ("x = 3", "3", "4"),
    ("2x + 1", r"\boxed{1 + 2x}", "2"),
    ("(1, 2)", r"\boxed{(1,2)}", "2"),
    (r"50\%", r"\boxed{0.5}", "5"),
    ("1,234", "1234", "1"),
    ("3.50", "3.5", "3"),
    ("-3", r"\boxed{-3}", "3"),
    ("7", "7", "17"),
    ("$7$", "x = 7", "8"),
    (r"so $\frac12$ it is", "1/2", "2"),
    (r"Thus \boxed{2\sqrt{3}}.", r"$2\sqrt3$", "2"),
]


@pytest.mark.parametrize(("answer", "right", "wrong"), LATEX_PAIRS)
def test_math_verify_reads_the_reference_answer_as_latex(answer: str, right: str, wrong: str) -> None:
    assert [reward("math_verify", response, answer) for response in (right, wrong)] == [1.0, 0.0]


def test_math_verify_refuses_a_reference_answer_that_is_not_mathematics() -> None:
    with pytest.raises(RewardError, match=r"'#### 72' is not mathematics\. Put only the final answer"):
        reward("math_verify", "72", "#### 72")


def test_reasoning_gym_scores_by_the_entry_and_prefers_the_tagged_answer() -> None:
    source = "reasoning_gym://basic_arithmetic?size=1&seed=1"
    row = load_rows(source, DataConfig(train=source))[0]
    answer, extra = row["answer"], {"entry": row["entry"]}
    assert reward("reasoning_gym", f" {answer}\n", answer, **extra) == 1.0
    assert reward("reasoning_gym", f"I think\n<answer>{answer}</answer>", answer, **extra) == 1.0
    assert reward("reasoning_gym", "<answer>x</answer>", answer, **extra) == 0.0
    tries = [f"<answer>{first}</answer> no: <answer>{last}</answer>" for first, last in (("x", answer), (answer, "x"))]
    assert [reward("reasoning_gym", text, answer, **extra) for text in tries] == [1.0, 0.0]  # the last one counts
    with pytest.raises(RewardError, match="no column 'entry'"):
        reward("reasoning_gym", "1", "1")


def test_a_function_is_found_by_import_path() -> None:
    assert resolve("decimal:Decimal.exp") is Decimal.exp


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact_nmber", "built-in ones .exact_number, math_verify, reasoning_gym"),
        ("no.such.module:f", "ModuleNotFoundError.*Built in are exact_number"),
        ("math:no_such", "no_such"),
        ("math:pi", "is a float, not a function"),
        ("math:", "is not a reward function"),
        (
            "rl/my_rewards.py:score",
            r"names a file\. Use the name by which Python imports it, my_rewards:score, and start",
        ),
    ],
)
def test_a_function_that_cannot_be_resolved_is_refused(name: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        resolve(name)


def test_module_of_the_working_directory_is_found_after_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for module in ("queue", "yaml", "rewards_of_mine"):
        (tmp_path / f"{module}.py").write_text("def score(response, **row): return 1.0\n")
    assert resolve("rewards_of_mine:score")("") == 1.0
    assert sys.path[-1] == str(tmp_path)
    for module in ("queue", "yaml"):
        with pytest.raises(
            RewardError, match=rf"module {module} in .* before {tmp_path}/{module}\.py.* my_{module}:score"
        ):
            resolve(f"{module}:score")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1.0", [1.0], {"a": float("nan")}, {"a": None}])
def test_a_value_that_is_no_finite_number_is_refused_with_function_and_value(value: Any) -> None:
    with pytest.raises(RewardError, match=r"reward 'mine(/a)?' returned"):
        as_parts("mine", value)


@pytest.mark.parametrize("value", [1e39, -1e39, 1.1e15, {"a": 1e39}])
def test_a_value_that_would_overflow_in_the_gradient_is_refused(value: Any) -> None:
    with pytest.raises(RewardError, match=r"reward 'mine(/a)?' is .*. Allowed: -1e\+15 to 1e\+15, because gradients"):
        as_parts("mine", value)
    assert as_parts("mine", 1e15) == {"mine": 1e15}


async def judge(response: str, **row: Any) -> float:
    return 1.0


def test_a_function_that_turns_out_to_be_async_is_named_so() -> None:
    with pytest.raises(
        RewardError, match=r"reward 'mine' is async: it returned a coroutine\. Make it a plain function"
    ):
        as_parts("mine", judge("7"))


@pytest.mark.parametrize(
    ("template", "expected"),
    [("{text}", "7"), ("{raw}", "7<|end|>"), ("<think>{text}", "<think>7"), ("<think>{raw}!", "<think>7<|end|>!")],
)
def test_an_option_says_what_a_function_sees_of_a_response(template: str, expected: str) -> None:
    reward = RewardConfig(function="exact_number", options={"response": template, "bonus": 1})
    seen = Response("7", 2, "7<|end|>").within(reward.template)
    assert (seen, seen.tokens, reward.arguments) == (expected, 2, {"bonus": 1})


@pytest.mark.parametrize("template", ["raw", "", "{text}{raw}", "{text}{text}", None, 1])
def test_a_template_without_exactly_one_part_is_refused(template: Any) -> None:
    with pytest.raises(ValueError, match=r"response must be a text that has \{text\} or \{raw\} once"):
        RewardConfig(function="exact_number", options={"response": template})


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, 0.0), (96, 0.0), (97, -0.125), (100, -0.5), (104, -1.0), (108, -1.5)]
)
def test_long_responses_are_punished_from_the_buffer_on(tokens: int, expected: float) -> None:
    response = Response("x", tokens)
    assert BUILT_IN["overlong"](response, prompt="", answer=None, extra={}, budget=104, buffer=8) == expected
    twice = BUILT_IN["overlong"](response, prompt="", answer=None, extra={}, budget=104, buffer=8, penalty=2.0)
    assert twice == 2 * expected


@pytest.mark.parametrize(("budget", "buffer"), [(8, 0), (8, -1), (8, 9), (0, 0)])
def test_a_buffer_that_does_not_fit_into_the_budget_is_refused(budget: int, buffer: int) -> None:
    with pytest.raises(RewardError, match=f"buffer = {buffer} is not a number of tokens from 1 to budget = {budget}"):
        overlong(Response("x", 1), prompt="", answer=None, extra={}, budget=budget, buffer=buffer)


def test_a_response_is_a_text() -> None:
    response = Response("seven", 2)
    assert (response, response.tokens, type(str(response))) == ("seven", 2, str)


def test_numbers_of_any_kind_and_mappings_of_them_are_rewards() -> None:
    assert as_parts("mine", np.float32(0.5)) == {"mine": 0.5}
    assert as_parts("mine", True) == {"mine": 1.0}
    with pytest.raises(RewardError, match="part 'len > 3'"):
        as_parts("mine", {"len > 3": 1.0})
    assert as_parts("mine", {"format": 1, "length": -0.5}) == {"mine/format": 1.0, "mine/length": -0.5}


def test_a_worker_starts_with_the_standard_library_alone() -> None:
    code = "import sys, tidemill.rollout.rewards; print({'numpy', 'pydantic', 'ray', 'torch'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert found.stdout.strip() == "set()"


# ---- a reward function of verl, called as docs/from_verl.md says

VERL_PAGE = Path(__file__).parents[2] / "docs/from_verl.md"
VERL_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    right = (data_source, solution_str, ground_truth, extra_info) == ("sums", "4", "4", {"index": 3})
    return {RESULT}
"""
VERL_ROW = {
    "data_source": "sums",
    "prompt": [{"role": "user", "content": "2 + 2"}],
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 3},
}


@pytest.mark.parametrize("result", ["scale * right", '{"score": scale * right, "acc": float(right)}'])
def test_a_reward_function_of_verl_is_called_as_the_page_says(
    result: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = f"ours_{len(result)}", f"theirs_{len(result)}"  # a module of the same name would come from the cache
    found = re.search(r"```python\n(.+?)```", VERL_PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    (tmp_path / f"{ours}.py").write_text(found[1].replace("my_verl_rewards", theirs))
    (tmp_path / f"{theirs}.py").write_text(VERL_REWARD.replace("{RESULT}", result))
    monkeypatch.syspath_prepend(tmp_path)
    config = DataConfig(train="x.parquet", answer_key="reward_model.ground_truth")
    columns = columns_of(PromptSet([VERL_ROW], CharTokenizer(True), config, 0).at(0))
    responses = [Response("4", 1), Response("5", 1)]
    assert apply(f"{ours}:score", "score", {"scale": 2.0}, columns, responses) == [{"score": 2.0}, {"score": 0.0}]
