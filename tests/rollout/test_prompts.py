from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from jinja2 import TemplateError
from rollout_rig import CharTokenizer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tidemill.config.data import DataConfig
from tidemill.errors import ConfigError, DataError
from tidemill.rollout.prompts import PromptSet, UnusablePromptError, check_same_data, data_digests, encode

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
    assert len(fits.prompt(0).token_ids) == length
    with pytest.raises(UnusablePromptError, match=rf"row \d: {length} tokens, more than .* = {length - 1}") as caught:
        exceeds.prompt(0)
    assert caught.value.reason == "too_long"


class RefusingTokenizer(CharTokenizer):
    """Refuses messages with an unknown role, and texts with a question mark, as a batch."""

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: bool) -> str:
        if "tool_calls" in conversation[0]:
            return len(conversation[0]["tool_calls"]) * "call"
        if conversation[0]["role"] == "system":
            raise TemplateError("System role not supported")
        return super().apply_chat_template(conversation, **options)

    def __call__(self, text: list[str], **options: bool) -> dict[str, list[list[int]]]:
        if any("?" in each for each in text):
            raise TypeError("TextEncodeInput must be Union")
        return super().__call__(text, **options)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("why?", "row 2: the tokenizer refuses it: TypeError"),
        ("a \ud83d", r"row 2: the prompt has '\\ud83d', half of a surrogate pair"),
        ([{"role": "system", "content": "a"}], r"row 2: the chat template refuses it: System role not supported\."),
        (
            [{"role": "user", "content": "a", "tool_calls": 3}],
            "row 2: the chat template refuses it: object of type 'int'",
        ),
        ("\u0100", "row 2: the token '\u0100' has the id 256, but the model's embedding has 200 rows"),
    ],
)
def test_a_prompt_that_cannot_be_rendered_is_refused_alone(prompt: Any, message: str) -> None:
    rows = [{"prompt": "a"}, {"prompt": prompt}, {"prompt": "b"}]
    prompts = PromptSet(rows, RefusingTokenizer(), DataConfig(train="x.jsonl"), 0, vocab_size=200)
    first, refused, last = prompts.token_ids(range(3))
    assert not isinstance(first, DataError) and not isinstance(last, DataError)
    assert isinstance(refused, UnusablePromptError)
    assert re.match(message, str(refused))
    with pytest.raises(UnusablePromptError, match=message) as caught:
        prompts.at(1)
    assert caught.value.reason == "unrenderable"
    assert "".join(map(chr, prompts.canary())) == "<user>a<assistant>"


def test_null_keys_of_messages_are_left_out() -> None:
    rows = [{"prompt": [{"role": "user", "content": "a", "tool_calls": None}]}]
    prompts = PromptSet(rows, RefusingTokenizer(), DataConfig(train="x.jsonl"), 0)
    assert rendered(prompts) == "<user>a<assistant>"


def test_special_tokens_behind_a_plain_prompt_are_left_out() -> None:
    """A tokenizer that was saved with `add_eos_token` ends every text with the end of the sequence."""
    tokenizer = Tokenizer(WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "one": 3, "two": 4}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    pair = [("<s>", 1), ("</s>", 2)]
    tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=pair)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    assert encode(fast, [{"role": "user", "content": "one two"}]).tolist() == [1, 3, 4]
    assert encode(fast, [{"role": "user", "content": "one </s>"}]).tolist() == [1, 3, 2]
    fast.chat_template = "{{ messages[0]['content'] }} </s>"
    assert encode(fast, [{"role": "user", "content": "one"}]).tolist() == [3, 2]


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
    with pytest.raises(ConfigError, match=r"data\.train = 'train\.jsonl'. Allowed: the same rows"):
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
