"""A reward function of verl, called as docs/from_verl.md says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rollout_rig import CharTokenizer

from tidemill.config.data import DataConfig
from tidemill.rollout.prompts import PromptSet
from tidemill.rollout.reward_pool import columns_of
from tidemill.rollout.rewards import Response, apply

PAGE = Path(__file__).parents[2] / "docs/from_verl.md"
THEIRS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    right = (data_source, solution_str, ground_truth, extra_info) == ("sums", "4", "4", {"index": 3})
    return {RESULT}
"""
ROW = {
    "data_source": "sums",
    "prompt": [{"role": "user", "content": "2 + 2"}],
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 3},
}


@pytest.mark.parametrize("result", ["scale * right", '{"score": scale * right, "acc": float(right)}'])
def test_a_reward_function_of_verl_is_called_as_the_page_says(
    result: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = f"ours_{len(result)}", f"theirs_{len(result)}"  # what is imported once is not read again
    found = re.search(r"```python\n(.+?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    (tmp_path / f"{ours}.py").write_text(found[1].replace("my_verl_rewards", theirs))
    (tmp_path / f"{theirs}.py").write_text(THEIRS.replace("{RESULT}", result))
    monkeypatch.syspath_prepend(tmp_path)
    config = DataConfig(train="x.parquet", answer_key="reward_model.ground_truth")
    columns = columns_of(PromptSet([ROW], CharTokenizer(True), config, 0).at(0))
    responses = [Response("4", 1), Response("5", 1)]
    assert apply(f"{ours}:score", "score", {"scale": 2.0}, columns, responses) == [{"score": 2.0}, {"score": 0.0}]
