"""What steps pass on to each other, cut to what the report needs.

KFP hands all inputs of a step to it as one argument of a command, for which Linux has 128 KiB, and keeps them in etcd.
MLflow and the store have every answer in full.
"""

from __future__ import annotations

from dataclasses import replace

from tidemill.observe.report import Sample, Summary
from tidemill.protocols import Answer, Evaluation

LONGEST = 500
"""Characters of a text; there are 30 in what `register` is given, of up to six bytes each."""
CUT = " [...] "


def excerpt(summary: Summary) -> Summary:
    """The summary with the beginning and the end of long prompts and answers."""
    return replace(summary, samples=tuple(shortened(sample) for sample in summary.samples))


def shown(evaluation: Evaluation, summary: Summary) -> Evaluation:
    """The evaluation with the answers that the report shows, cut as `excerpt` cuts the summary."""
    asked = {clip(sample.prompt) for sample in summary.samples}
    kept: dict[str, Answer] = {}
    for answer in map(cut, evaluation.answers):
        if answer.prompt in asked:
            kept.setdefault(answer.prompt, answer)  # prompts that are cut to the same text count once, as the first
    return replace(evaluation, answers=tuple(kept.values()))


def shortened(sample: Sample) -> Sample:
    """A sample with short texts."""
    return Sample(clip(sample.prompt), *(maybe(text) for text in (sample.before, sample.after, sample.expected)))


def cut(answer: Answer) -> Answer:
    """An answer with short texts."""
    return replace(answer, prompt=clip(answer.prompt), response=clip(answer.response), expected=maybe(answer.expected))


def maybe(text: str | None) -> str | None:
    """The text short, if there is one."""
    return None if text is None else clip(text)


def clip(text: str) -> str:
    """The beginning and the end of a long text; a short one, such as this returns, stays as it is."""
    half = (LONGEST - len(CUT)) // 2
    return text if len(text) <= LONGEST else f"{text[:half]}{CUT}{text[-half:]}"
