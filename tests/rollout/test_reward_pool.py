from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tidemill.actors.rollouter import reward_workers
from tidemill.config.data import RewardConfig
from tidemill.errors import RewardError, RewardTimeoutError
from tidemill.records import Prompt
from tidemill.rollout.reward_pool import RewardPool, decode, with_raw
from tidemill.rollout.rewards import Response

DEADLINE_S = 120.0
ATTEMPTS = 50  # the deadline is short, so that tests of calls that hang are fast
MINE = """
import os, time
def length(response, *, prompt, answer, extra, factor=1): return factor * len(response)
def parts(response, *, prompt, answer, extra): return {"a": 1.0, "b": float(answer) + extra["level"]}
def tokens(response, **row): return float(response.tokens)
def process(response, **row): return float(os.getpid())
def slow(response, **row):
    word, _, told = response.partition(" ")
    if told: open(told, "w").close()
    while word == "hang": pass
    return 1.0
def waits(response, **row):
    while not os.path.exists(response): time.sleep(0.01)
    return 1.0
def broken(response, **row): return {}["no such key"]
def unpicklable(response, **row): raise type("Local", (Exception,), {})("gone wrong")
def leaves(response, **row): raise SystemExit(3)
def dies(response, **row): os._exit(9)
def spawns(response, **row):
    import subprocess, sys
    word, _, folder = response.partition(" ")
    code = f"import os, time; open(f'{folder}/{{os.getpid()}}', 'w').close(); time.sleep(1000)"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    subprocess.Popen([sys.executable, "-c", code])
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    subprocess.Popen(["sh", "-c", 'setsid "$0" -c "$1" & exit', sys.executable, nested])
    while len(os.listdir(folder)) < 3: time.sleep(0.01)
    if word == "die": os._exit(9)
    while word == "hang": pass
    return 1.0
def huge(response, **row): return 1e39
def nan(response, **row): return float("nan")
def pathological(response, **row):
    import re
    return float(bool(re.fullmatch("(a+)+b", response)))
"""


@pytest.fixture
def pool(tmp_path: Path) -> Callable[..., Any]:
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")

    @asynccontextmanager
    async def opened(*functions: str | RewardConfig, workers: int = 1) -> AsyncIterator[RewardPool]:
        rewards = [RewardConfig(function=f, timeout_s=DEADLINE_S) if isinstance(f, str) else f for f in functions]
        pool = RewardPool(rewards, workers, search_path=[str(tmp_path)])
        try:
            yield pool
        finally:
            await pool.close()

    return opened


def prompt(answer: str | None = "2") -> Prompt:
    return Prompt(3, 3, np.zeros(1, np.int32), "1+1?", answer, {"level": 4})


def said(*texts: str) -> list[Response]:
    return [Response(text, len(text)) for text in texts]


def children() -> list[int]:
    """The worker processes; Python's resource tracker is shared and stays."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            found += [child.pid] if "spawn_main" in " ".join(child.cmdline()) else []
    return found


def runs(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def answer(rewards: RewardPool, response: str = "ok") -> list[tuple[float, dict[str, float]]]:
    """The score of a response; repeated, because a busy machine may miss the short deadline."""
    for _ in range(ATTEMPTS):
        with suppress(RewardTimeoutError):
            return await rewards.score(prompt(), said(response))
    raise AssertionError("no answer is in time")


async def test_the_reward_is_the_weighted_sum_and_its_parts_have_names(pool: Callable[..., Any]) -> None:
    weighted = RewardConfig(function="mine:length", weight=0.5, options={"factor": 10})
    async with pool("exact_number", weighted, "mine:length", "mine:parts") as rewards:
        scores = await rewards.score(prompt(), said("2", "no"))
    assert scores[0][1] == {"exact_number": 1.0, "length": 10.0, "length-2": 1.0, "parts/a": 1.0, "parts/b": 6.0}
    assert [total for total, _ in scores] == [1 + 5 + 1 + 7, 0 + 10 + 2 + 7]


async def test_a_function_gets_the_number_of_tokens_of_a_response(pool: Callable[..., Any]) -> None:
    long = RewardConfig(function="overlong", options={"budget": 4, "buffer": 2})
    async with pool("mine:tokens", long) as rewards:
        scores = await rewards.score(prompt(), [Response("a", 2), Response("b c d", 4)])
    assert [parts for _, parts in scores] == [{"tokens": 2.0, "overlong": 0.0}, {"tokens": 4.0, "overlong": -1.0}]


async def test_rewards_run_in_other_processes(pool: Callable[..., Any]) -> None:
    async with pool("mine:process") as rewards:
        [(pid, _)] = await rewards.score(prompt(), said("x"))
    assert pid != os.getpid()


async def test_a_call_that_hangs_is_killed_in_time_and_the_pool_keeps_its_workers(pool: Callable[..., Any]) -> None:
    slow = RewardConfig(function="mine:slow", timeout_s=0.5)
    async with pool(slow, workers=2) as rewards:
        await rewards.start()
        hung = [rewards.score(prompt(), said("ok", "hang")) for _ in range(3)]
        async with asyncio.timeout(DEADLINE_S):
            found = await asyncio.gather(*hung, answer(rewards), return_exceptions=True)
        assert [type(result) for result in found[:3]] == [RewardTimeoutError] * 3
        assert "timed out: more than 0.5 s" in str(found[0])
        assert found[3] == [(1.0, {"slow": 1.0})]
        both = await asyncio.gather(*(answer(rewards) for _ in range(2)))
        assert both == [[(1.0, {"slow": 1.0})]] * 2
        await until(lambda: len(children()) == 2)  # a killed worker is replaced in the background


async def test_a_call_that_holds_the_interpreter_lock_is_killed_too(pool: Callable[..., Any]) -> None:
    async with pool(RewardConfig(function="mine:pathological", timeout_s=0.3)) as rewards:
        with pytest.raises(RewardTimeoutError):
            await rewards.score(prompt(), said("a" * 60))
        assert await answer(rewards, "aab") == [(1.0, {"pathological": 1.0})]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("mine:broken", r"failed on prompt 3:\nTraceback(.|\n)*KeyError: 'no such key'"),
        ("mine:unpicklable", "Local: gone wrong"),
        ("mine:leaves", "SystemExit: 3"),
        ("mine:nan", r"failed on prompt 3:\nreward 'nan' returned nan, which is not a finite number$"),
        ("mine:dies", "the worker of reward 'mine:dies' died"),
        ("mine:huge", r"failed on prompt 3:\nreward 'huge' is 1e\+39. Allowed: -1e\+15 to 1e\+15"),
        ("math_verify", r"failed on prompt 3:\nmath_verify: the row has no reference answer"),
    ],
)
async def test_a_failure_reaches_the_caller_and_the_pool_lives(
    pool: Callable[..., Any], function: str, message: str
) -> None:
    async with pool(function) as rewards:
        for _ in range(2):
            with pytest.raises(RewardError, match=message) as caught:
                await rewards.score(prompt(None), said("x"))
            assert not isinstance(caught.value, RewardTimeoutError)


@pytest.mark.parametrize("word", ["hang", "die", "ok"])
async def test_what_a_worker_has_started_ends_with_it(pool: Callable[..., Any], word: str, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    async with pool(RewardConfig(function="mine:spawns", timeout_s=600)) as rewards:
        scoring = asyncio.create_task(rewards.score(prompt(), said(f"{word} {pids}")))
        await until(lambda: len(list(pids.iterdir())) == 3)
        started = [int(path.name) for path in pids.iterdir()]
        if word == "hang":
            scoring.cancel()
        ended = await asyncio.gather(scoring, return_exceptions=True)
        expected = {"hang": asyncio.CancelledError, "die": RewardError, "ok": list}
        assert isinstance(ended[0], expected[word])
        if word != "ok":  # the worker lives on, and its children until the pool closes
            await until(lambda: not any(map(runs, started)))
    await until(lambda: not any(map(runs, started)))


async def test_a_weighted_sum_that_would_overflow_is_refused(pool: Callable[..., Any]) -> None:
    async with pool(RewardConfig(function="mine:length", weight=1e16, timeout_s=DEADLINE_S)) as rewards:
        with pytest.raises(RewardError, match=r"'the weighted sum' is 2e\+16. Allowed: -1e\+15 to 1e\+15"):
            await rewards.score(prompt(), said("no"))


class LetterTokenizer:
    """One token a letter; 0 is its special token."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join("</s>" if token == 0 else chr(token) for token in ids if token or not skip_special_tokens)


def test_special_tokens_are_decoded_where_a_reward_sees_them() -> None:
    for raw, expected in ((False, ""), (True, "a</s>")):
        response = decode(LetterTokenizer(), raw, np.array([ord("a"), 0], np.int32))
        assert (response, response.tokens, response.raw) == ("a", 2, expected)


async def test_a_function_sees_a_response_as_its_option_says(pool: Callable[..., Any]) -> None:
    plain = RewardConfig(function="mine:length", timeout_s=DEADLINE_S)
    whole = RewardConfig(function="mine:length", timeout_s=DEADLINE_S, options={"response": "<t>{raw}", "factor": 2})
    assert (with_raw([plain]), with_raw([plain, whole])) == (False, True)
    async with pool(plain, whole) as rewards:
        [(_, parts)] = await rewards.score(prompt(), [Response("a", 2, "a</s>")])
    assert parts == {"length": 1.0, "length-2": 16.0}


@pytest.mark.parametrize("function", ["mine:no_such", "nobody:length"])
async def test_start_refuses_a_function_that_cannot_be_imported(pool: Callable[..., Any], function: str) -> None:
    async with pool(function) as rewards:
        with pytest.raises(RewardError, match=function):
            await rewards.start()


async def test_a_pool_whose_idle_worker_was_killed_goes_on(pool: Callable[..., Any]) -> None:
    async with pool("mine:slow") as rewards:
        await rewards.start()
        for pid in children():
            os.kill(pid, signal.SIGKILL)
        scores = None
        while scores is None:
            with suppress(RewardError):  # until the pool has noticed that the worker is dead
                scores = await rewards.score(prompt(), said("ok"))
        assert scores == [(1.0, {"slow": 1.0})]


async def test_scoring_does_not_hold_up_the_event_loop(pool: Callable[..., Any], tmp_path: Path) -> None:
    async with pool("mine:waits") as rewards:
        await rewards.start()
        scoring = asyncio.create_task(rewards.score(prompt(), said(str(tmp_path / "go"))))
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert not scoring.done()
        (tmp_path / "go").touch()  # the reward waits for this file
        assert await scoring == [(1.0, {"waits": 1.0})]


async def test_a_call_that_hangs_does_not_hold_up_the_others(pool: Callable[..., Any]) -> None:
    async with pool(RewardConfig(function="mine:slow", timeout_s=600), workers=reward_workers()) as rewards:
        await rewards.start()
        hung = asyncio.create_task(rewards.score(prompt(), said("hang")))
        assert await asyncio.wait_for(rewards.score(prompt(), said("ok")), DEADLINE_S) == [(1.0, {"slow": 1.0})]
        assert not hung.done()
        hung.cancel()


async def test_close_leaves_no_process_and_refuses_calls(pool: Callable[..., Any], tmp_path: Path) -> None:
    async with pool("mine:slow", workers=2) as rewards:
        await rewards.start()
        hung = asyncio.create_task(rewards.score(prompt(), said(f"hang {tmp_path / 'hangs'}")))
        await until((tmp_path / "hangs").exists)
    assert children() == []
    with pytest.raises(RewardError, match="is closed"):
        await rewards.score(prompt(), said("ok"))
    hung.cancel()


PARENT = """
import asyncio, os
import numpy
from tidemill.config.data import RewardConfig
from tidemill.records import Prompt
from tidemill.rollout.reward_pool import RewardPool
from tidemill.rollout.rewards import Response

async def main():
    pool = RewardPool([RewardConfig(function="mine:slow", timeout_s=100)])
    await pool.start()
    hung = asyncio.create_task(pool.score(Prompt(0, 0, numpy.zeros(1, numpy.int32), ""), [Response("hang hangs", 3)]))
    while not os.path.exists("hangs"):
        await asyncio.sleep(0.01)
    print("ready", flush=True)
    await hung

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_workers_find_modules_in_the_working_directory_and_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    (tmp_path / "parent.py").write_text(PARENT, encoding="utf-8")
    with subprocess.Popen([sys.executable, "parent.py"], cwd=tmp_path, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        workers = psutil.Process(parent.pid).children(recursive=True)
        assert workers
        parent.kill()
        _, alive = psutil.wait_procs(workers, timeout=DEADLINE_S)
    assert alive == []


class Scorer:
    """A Ray actor that makes a good call, then one that hangs."""

    async def score(self, folder: str) -> tuple[Any, str]:
        rewards = [RewardConfig(function="mine:slow", timeout_s=1), RewardConfig(function="mine:length")]
        pool = RewardPool(rewards, search_path=[folder])
        await pool.start()
        scores = await answer(pool)
        with pytest.raises(RewardTimeoutError) as caught:
            await pool.score(prompt(), said("hang"))
        await pool.close()
        return scores, str(caught.value)


@pytest.mark.slow
def test_the_pool_works_inside_a_ray_actor(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        actor = ray.remote(Scorer).remote()
        scores, message = ray.get(actor.score.remote(str(tmp_path)), timeout=300)
    finally:
        ray.shutdown()
        ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert scores == [(3.0, {"slow": 1.0, "length": 2.0})]
    assert "timed out" in message
