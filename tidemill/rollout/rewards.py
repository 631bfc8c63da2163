"""Reward functions: the built-in ones, how any other is found, and how a worker process applies them.

A reward function has the signature

    def reward(response: str, *, prompt: str, answer: str | None, extra: Mapping[str, Any], **options)
        -> float | Mapping[str, float]

`response` is a `Response`, which also says how many tokens it has; `prompt` is the user's question, `answer` the
reference answer, `extra` the row's other columns; `options` come from the config. A mapping reports parts under their
own names; the value of the function is then their sum.

Reward worker processes import this module, so it needs the standard library and psutil only.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import math
import multiprocessing
import os
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import Any, Self

from tidemill.errors import RewardError
from tidemill.rollout.worker_process import begin_process_tree, end_process_tree

Reward = Callable[..., "float | Mapping[str, float]"]

LARGEST_REWARD = 1e15  # the square of a gradient norm in proportion to it stays finite in float32
NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
PART_NAME = re.compile(r"[A-Za-z0-9_.-]+")  # allowed in a metric's name by every tracker
SCIENTIFIC = re.compile(r"(?<![\w.])\d+(?:\.\d+)?[eE][-+]?\d{1,2}(?!\w)")
ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class Response(str):
    """The text of a response, as reward functions get it.

    Attributes:
        tokens: how many were sampled for it, the end token included.
        raw: the text with special tokens, where a reward uses it.
    """

    tokens: int
    raw: str

    def __new__(cls, text: str, tokens: int, raw: str = "") -> Self:
        response = super().__new__(cls, text)
        response.tokens, response.raw = tokens, raw
        return response

    def __reduce__(self) -> tuple[type[Response], tuple[str, int, str]]:  # pickled for the worker
        return type(self), (str(self), self.tokens, self.raw)

    def within(self, template: str) -> Response:
        """What a function gets whose option `response` is this template, with `{text}` or `{raw}` in it."""
        part, text = ("{raw}", self.raw) if "{raw}" in template else ("{text}", str(self))
        before, _, after = template.partition(part)
        return Response(f"{before}{text}{after}", self.tokens)


# ---- the built-in functions


def exact_number(response: str, *, prompt: str, answer: str | None, extra: Mapping[str, Any]) -> float:
    """1 if the first number in the response equals the answer, else 0. "1,234" and "1234.0" are the same number."""
    del prompt, extra
    expected = first_number(required(answer, "exact_number"))
    if expected is None:
        raise RewardError(f"exact_number: the reference answer {answer!r} is not a number")
    return float(first_number(response) == expected)


def math_verify(response: str, *, prompt: str, answer: str | None, extra: Mapping[str, Any]) -> float:
    r"""1 if the library math-verify finds the final answer of the response equal to the reference answer, else 0.

    The reference is LaTeX, as in verl, with or without `\boxed{}` and `$`. In the response the library looks for
    `\boxed{}`, for LaTeX between `$`, and then for a plain number or fraction. `1e-3` is 0.001 in both.

    The library's own time-outs use `signal.alarm`, which works in a main thread only; they are off, because the reward
    pool kills a call that takes too long.
    """
    del prompt, extra
    library = import_library("math_verify", "math-verify")
    reference = without_exponents(required(answer, "math_verify"))
    gold = parse_reference(reference)
    if all(isinstance(found, str) for found in gold):
        raise RewardError(
            f"math_verify: the reference answer {answer!r} is not mathematics. Put only the final answer, as LaTeX or "
            "a number, into data.answer_key, or use another reward."
        )
    found = library.parse(without_exponents(response), parsing_timeout=None)
    return float(library.verify(gold, found, float_rounding=decimal_places(reference), timeout_seconds=None))


def reasoning_gym(response: str, *, prompt: str, answer: str | None, extra: Mapping[str, Any]) -> float:
    """Score of the row's own task, for rows of `reasoning_gym://TASK`.

    The last `<answer>...</answer>` of the response is scored; without one, the whole response.
    """
    del prompt, answer
    if "entry" not in extra:
        raise RewardError("reasoning_gym: the row has no column 'entry'; use it with data.train: reasoning_gym://TASK")
    entry = extra["entry"]
    tagged = ANSWER_TAG.findall(response)
    text = (tagged[-1] if tagged else response).strip()
    return float(task_scorer(entry["metadata"]["source_dataset"])(text, entry))


def overlong(
    response: Response,
    *,
    prompt: str,
    answer: str | None,
    extra: Mapping[str, Any],
    budget: int,
    buffer: int,
    penalty: float = 1.0,
) -> float:
    """Soft punishment of long responses: 0 up to `budget - buffer` tokens, from there linear to `-penalty` at `budget`.

    Yu et al. 2025 (DAPO, arXiv:2503.14476), equation 13. Beyond `budget`, which `rollout.max_new_tokens` may allow, the
    punishment keeps growing, as in verl.
    """
    del prompt, answer, extra
    if not 0 < buffer <= budget:
        raise RewardError(f"overlong: buffer = {buffer} is not a number of tokens from 1 to budget = {budget}")
    return min(0.0, penalty * (budget - buffer - response.tokens) / buffer)


BUILT_IN: Mapping[str, Reward] = {
    "exact_number": exact_number,
    "math_verify": math_verify,
    "reasoning_gym": reasoning_gym,
    "overlong": overlong,
}
LIBRARIES = {"math_verify": ("math_verify", "math-verify"), "reasoning_gym": ("reasoning_gym", "reasoning-gym")}


def first_number(text: str) -> Decimal | None:
    """The first number in a text, thousands separators allowed."""
    match = NUMBER.search(text.replace("\N{MINUS SIGN}", "-"))
    return None if match is None else Decimal(match.group().replace(",", ""))


@lru_cache
def parse_reference(reference: str) -> list[Any]:
    r"""What math-verify reads in a reference answer: expressions, and its text.

    If the answer marks its mathematics, the words around it are skipped. Otherwise all of it is LaTeX: without the box,
    the library would take one of its plain numbers, for example the 2 of `2\sqrt{3}`.
    """
    library = import_library("math_verify", "math-verify")
    boxed = f"\\boxed{{{reference}}}"
    texts = [reference, boxed] if "$" in reference or "\\boxed" in reference else [boxed]
    latex = (library.LatexExtractionConfig(),)
    parsed = (library.parse(text, extraction_config=latex, parsing_timeout=None) for text in texts)
    return next((found for found in parsed if found), [])


def without_exponents(text: str) -> str:
    """Write numbers such as `1e-3` as decimals; in LaTeX the `e` would be Euler's number."""
    return SCIENTIFIC.sub(lambda number: format(Decimal(number.group()), "f"), text)


def decimal_places(reference: str) -> int:
    """How many decimals to compare: 6 as in math-verify, and at least 4 significant digits of a small number."""
    number = NUMBER.fullmatch(reference.strip())
    value = Decimal(number.group().replace(",", "")) if number else Decimal(1)
    return max(6, 3 - value.adjusted()) if value else 6


def required(answer: str | None, function: str) -> str:
    if answer is None:
        raise RewardError(f"{function}: the row has no reference answer; set data.answer_key to its column")
    return answer


@lru_cache
def task_scorer(task: str) -> Callable[[str, Mapping[str, Any]], float]:
    """The scoring function of a reasoning-gym task; cached, because its construction builds a data set."""
    scorer: Callable[[str, Mapping[str, Any]], float]
    scorer = import_library("reasoning_gym", "reasoning-gym").get_score_answer_fn(task)
    return scorer


# ---- how a function is found


def resolve(name: str) -> Reward:
    """The reward function of a name, with the library it needs imported.

    Args:
        name: a built-in name, or an import path `package.module:function`.

    Raises:
        RewardError: it cannot be imported or is not callable.
    """
    if name in BUILT_IN:
        if name in LIBRARIES:
            import_library(*LIBRARIES[name])
        return BUILT_IN[name]
    module_name, colon, path = name.partition(":")
    if not (colon and module_name and path):
        raise RewardError(
            f"{name!r} is not a reward function. Allowed are the built-in ones ({', '.join(BUILT_IN)}) and "
            "package.module:function."
        )
    if module_name.endswith(".py"):
        module = module_name.removesuffix(".py").rpartition("/")[2]
        raise RewardError(
            f"reward {name!r} names a file. Use the name by which Python imports it, {module}:{path}, and start the "
            "run in the file's folder."
        )
    found: Any = import_module(module_name, name)
    for attribute in path.split("."):
        try:
            found = getattr(found, attribute)
        except AttributeError as error:
            raise RewardError(f"reward {name!r}: {error}") from error
    if not callable(found):
        raise RewardError(f"reward {name!r} is a {type(found).__name__}, not a function")
    function: Reward = found
    return function


def import_module(module_name: str, name: str) -> Any:
    """The module of an import path, also in the working directory, which is searched after all other folders.

    A user's module may raise any exception, hence the broad except.
    """
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    try:
        refuse_hidden_module(module_name.partition(".")[0], here, name)
        return importlib.import_module(module_name)
    except RewardError:
        raise
    except Exception as error:
        raise RewardError(
            f"reward {name!r} cannot be imported: {type(error).__name__}: {error}. Built in are {', '.join(BUILT_IN)}; "
            "put your own module into the working directory, or install it."
        ) from error


def refuse_hidden_module(module: str, folder: str, name: str) -> None:
    """Refuse a module of a folder if Python finds another module of this name first.

    Raises:
        RewardError: naming both files.
    """
    own = PathFinder.find_spec(module, [folder])
    found = find_spec(module) if own else None
    if own and own.origin and found and found.origin != own.origin:
        raise RewardError(
            f"reward {name!r}: Python finds the module {module} in {found.origin} before {own.origin}. Rename "
            f"yours, for example to my_{module}.py, and the reward to my_{name}."
        )


def import_library(module: str, package: str) -> Any:
    """Import an optional library.

    Raises:
        RewardError: it is not installed.
    """
    try:
        with warnings.catch_warnings():
            # Some dependencies of reasoning-gym have invalid escapes, which warn whenever they are compiled.
            warnings.simplefilter("ignore", SyntaxWarning)
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise RewardError(f"this reward needs a library: pip install {package} ({error})") from error


# ---- in a worker process


def prepare_worker(search_path: Sequence[str], functions: Sequence[str]) -> None:
    """Initialise a worker process: extend its module path, import the functions, exit with the parent."""
    begin_process_tree()
    threading.Thread(target=exit_with_parent, daemon=True).start()
    os.environ.pop("PYTHONSAFEPATH", None)  # programs that a reward starts find modules as they do outside of a run
    sys.path += [folder for folder in search_path if folder not in sys.path]
    # The library warns that the caller must enforce the time-out, which the pool does.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    for function in functions:
        # The pool would restart a worker that fails here for ever; `import_error` reports the same error to the user.
        with contextlib.suppress(RewardError):
            resolve(function)


def exit_with_parent() -> None:
    """Exit with all children when the parent process is gone, however it ended and whatever this process is doing."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        end_process_tree(os.getpid())
        os._exit(1)


def import_error(functions: Sequence[str]) -> str | None:
    """The message of the first function that cannot be resolved, if any."""
    for function in functions:
        try:
            resolve(function)
        except RewardError as error:
            return str(error)
    return None


def apply(
    name: str, label: str, options: Mapping[str, Any], columns: Mapping[str, Any], responses: Sequence[Response]
) -> list[dict[str, float]] | str:
    """Apply a reward function to all responses of one prompt.

    Args:
        name: of the function, as in `resolve`.
        label: under which the values are reported.
        options: keyword arguments from the config.
        columns: `prompt`, `answer` and `extra` of the row.
        responses: to the prompt.

    Returns:
        The parts for every response, or the error of the first that failed: as text, because not every exception can
        be pickled.
    """
    try:
        function = resolve(name)
        values = [function(response, **columns, **options) for response in responses]
        return [as_parts(label, value) for value in values]
    except RewardError as error:  # its message says everything; a traceback would hide it
        return str(error)
    except (Exception, SystemExit):  # noqa: BLE001 - the boundary of the process; the pool raises it
        return traceback.format_exc()


def as_parts(name: str, value: Any) -> dict[str, float]:
    """The return value of a reward function as finite parts by name.

    Args:
        name: of a plain number; the parts of a mapping are called `name/part`.
        value: as the function returned it.

    Raises:
        RewardError: naming the function and the value.
    """
    if isinstance(value, Mapping):
        for part in value:
            if not PART_NAME.fullmatch(str(part)):
                raise RewardError(
                    f"reward {name!r} has a part {part!r}: allowed are letters, digits and _ - . in its name"
                )
        return {f"{name}/{part}": as_number(f"{name}/{part}", number) for part, number in value.items()}
    return {name: as_number(name, value)}


def as_number(name: str, value: Any) -> float:
    """A float up to `LARGEST_REWARD`; accepts whatever has `__float__`, such as numpy scalars, but no text."""
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()  # else Python warns that nothing awaited it
        raise RewardError(
            f"reward {name!r} is async: it returned a {type(value).__name__}. Make it a plain function; it may block, "
            "because every call runs in a process of its own."
        )
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, InvalidOperation, OverflowError) as error:
        raise RewardError(f"reward {name!r} returned {value!r}, which is not a number") from error
    if not math.isfinite(number):
        raise RewardError(f"reward {name!r} returned {value!r}, which is not a finite number")
    if abs(number) > LARGEST_REWARD:
        raise RewardError(
            f"reward {name!r} is {number:g}. Allowed: {-LARGEST_REWARD:g} to {LARGEST_REWARD:g}, because gradients "
            "are float32. Scale it down."
        )
    return number
