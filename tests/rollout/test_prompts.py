from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from rollout_rig import CharTokenizer

from tidemill.config.data import DataConfig
from tidemill.errors import ConfigError, DataError
from tidemill.rollout.prompts import PromptSet, check_same_data, data_digests

ROWS = [{"prompt": f"question {n}", "answer": n, "level": n % 2} for n in range(7)]


def prompt_set(rows: list[dict[str, Any]] = ROWS, seed: int = 0, template: bool = True, **config: Any) -> PromptSet:
    return PromptSet(rows, CharTokenizer(template), DataConfig(train="x.jsonl", **config), seed)


def rendered(prompts: PromptSet, uid: int = 0) -> str:
    return "".join(map(chr, prompts.prompt(uid).token_ids))


def test_every_epoch_holds_every_row_once_in_another_order() -> None:
    prompts = prompt_set()
    epochs = [[prompts.prompt(uid).row for uid in range(7 * epoch, 7 * epoch + 7)] for epoch in range(3)]
    assert all(sorted(order) == list(range(7)) for order in epochs)
    assert len(set(map(tuple, epochs))) == 3


def test_an_occurrence_is_the_same_whatever_was_asked_before() -> None:
    first, second = prompt_set(), prompt_set()
    backwards = {uid: second.prompt(uid).row for uid in reversed(range(50))}
    assert backwards == {uid: first.prompt(uid).row for uid in range(50)}


def test_another_seed_gives_another_order_and_without_shuffling_it_is_the_data_s() -> None:
    def order(prompts: PromptSet) -> list[int]:
        return [prompts.prompt(uid).row for uid in range(14)]

    assert order(prompt_set(seed=1)) != order(prompt_set(seed=2))
    assert order(prompt_set(shuffle=False)) == [*range(7), *range(7)]


def test_the_stream_ends_after_the_last_epoch_or_never() -> None:
    assert prompt_set(epochs=5).total == 35
    assert prompt_set().total is None
    with pytest.raises(DataError, match="outside of the stream of 35"):
        prompt_set(epochs=5).prompt(35)


def test_a_string_becomes_a_user_message_after_the_system_prompt() -> None:
    prompts = prompt_set(shuffle=False, system_prompt="Be brief.")
    assert rendered(prompts) == "<system>Be brief.<user>question 0<assistant>"


def test_messages_are_used_as_they_are_and_the_text_is_the_last_question() -> None:
    messages = [{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    prompts = prompt_set([{"prompt": messages}], system_prompt="ignored")
    assert rendered(prompts) == "<user>a<assistant>b<user>c<assistant>"
    assert prompts.prompt(0).text == "c"


def test_a_tokenizer_without_a_template_gets_the_plain_text_with_its_special_tokens() -> None:
    assert rendered(prompt_set(shuffle=False, template=False)) == "^question 0"


def test_answer_and_other_columns_reach_the_rewards() -> None:
    prompt = prompt_set(shuffle=False).prompt(3)
    assert (prompt.uid, prompt.row, prompt.text, prompt.answer) == (3, 3, "question 3", "3")
    assert prompt.extra == {"level": 1}


@pytest.mark.parametrize(("answer", "text"), [(None, None), ("4", "4"), (4.5, "4.5"), (["a", 1], '["a", 1]')])
def test_an_answer_is_text_or_nothing(answer: Any, text: str | None) -> None:
    assert prompt_set([{"prompt": "q", "answer": answer}]).prompt(0).answer == text


def test_a_prompt_is_too_long_beyond_the_limit_and_never_cut() -> None:
    length = len("<user>question 0<assistant>")
    fits, exceeds = prompt_set(max_prompt_tokens=length), prompt_set(max_prompt_tokens=length - 1)
    assert not fits.too_long(fits.prompt(0))
    assert exceeds.too_long(exceeds.prompt(0))
    assert len(exceeds.prompt(0).token_ids) == length


def test_rows_are_tokenised_once() -> None:
    tokenizer = CharTokenizer()
    prompts = PromptSet(ROWS, tokenizer, DataConfig(train="x.jsonl"), seed=0)
    rows = Counter(prompts.prompt(uid).row for uid in range(70))
    assert set(rows.values()) == {10}
    assert tokenizer.encoded == 7


def test_canary_is_a_prompt_that_an_engine_can_score() -> None:
    rows = [{"prompt": ""}, {"prompt": "x"}, {"prompt": "a long question"}]
    canary = prompt_set(rows, template=False, max_prompt_tokens=8).canary()
    assert "".join(map(chr, canary)) == "^x"
    long = prompt_set([{"prompt": "a long question"}], template=False, max_prompt_tokens=8).canary()
    assert "".join(map(chr, long)) == "^a long "
    with pytest.raises(DataError, match="no prompt has two tokens"):
        prompt_set([{"prompt": ""}], template=False).canary()


def test_changed_rows_are_refused_by_the_setting_that_names_them() -> None:
    config = DataConfig(train="train.jsonl", held_out="held_out.jsonl")
    began = data_digests(prompt_set(), prompt_set(ROWS[:2]))
    check_same_data(config, {"cursor": 3, **began}, data_digests(prompt_set(), prompt_set(ROWS[:2])))
    with pytest.raises(ConfigError, match=r"data\.train = 'train\.jsonl': allowed is the same rows"):
        check_same_data(config, began, data_digests(prompt_set(ROWS[::-1]), prompt_set(ROWS[:2])))
    with pytest.raises(ConfigError, match=r"data\.held_out"):
        check_same_data(config, began, data_digests(prompt_set(), None))


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"reward_model": {"ground_truth": 34, "style": "rule"}}, "34"),
        ({"reward_model.ground_truth": "a column of that name"}, "a column of that name"),
        ({"reward_model": "no mapping"}, None),
        ({"reward_model": {"style": "rule"}}, None),
    ],
)
def test_the_answer_may_be_inside_a_mapping_column(row: dict[str, Any], answer: str | None) -> None:
    prompt = prompt_set([{"prompt": "q", **row}], answer_key="reward_model.ground_truth").prompt(0)
    assert prompt.answer == answer
    assert prompt.extra.get("reward_model") == row.get("reward_model")
