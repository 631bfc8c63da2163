"""A stub of the training for tests on a cluster: it places actors, counts steps, and can be resumed and stopped.

`kubernetes.env` sets: STUB_STEP_S is the time of a step; after STUB_HOLD steps the first attempt waits for its end;
STUB_ERROR, a class of tidemill.errors, ends attempt STUB_ERROR_AT with that error after the first step.
"""

from __future__ import annotations

import json
import os
import socket
import time

import ray

from tidemill import errors
from tidemill.cluster.local import ray_session
from tidemill.config.names import ROLLOUT_RESOURCE, TRAINER_RESOURCE
from tidemill.config.run import RunConfig
from tidemill.observe.events import EventLog, PhaseStarted, StepFinished
from tidemill.observe.report import Summary
from tidemill.store.lease import Claim, Fence
from tidemill.store.object_store import ObjectStore
from tidemill.store.server import open_store
from tidemill.train.stop import Stop


def train(config: RunConfig, stop: Stop, claim: Claim) -> Summary:
    """Count to `trainer.steps`, from where the last attempt ended."""
    with (
        open_store(config.store, config.output) as store,
        EventLog(config.folder / "events.jsonl") as log,
        ray_session(config),
    ):
        log.write(PhaseStarted(f"placed on {', '.join(places(config))}"))
        fence, began = Fence(store, config.name, claim), time.monotonic()
        step = done(store, config.name)
        while step < config.trainer.steps and stop.reason is None:
            if held(claim, step):
                time.sleep(0.1)
                continue
            step = count(step, fence, store, log, config)
            if os.environ.get("STUB_ERROR") and str(claim.attempt) == os.environ["STUB_ERROR_AT"]:
                raise vars(errors)[os.environ["STUB_ERROR"]]("the stub was told to fail")
    missing = {} if stop.reason is None else {"steps": stop.reason}
    seconds = time.monotonic() - began
    uri = store.uri(key(config.name))
    return Summary(step, 0.5, None, seconds, seconds, 1.0, None, None, 0, None, uri, uri, None, None, missing=missing)


def places(config: RunConfig) -> list[str]:
    """Names of the pods of trainer and engines."""

    @ray.remote(num_cpus=0)
    def where() -> str:
        return socket.gethostname()

    gpus = 1 if config.kubernetes.gpu_resource else 0
    tasks = [
        where.options(resources={resource: 1}, num_gpus=gpus).remote()
        for resource, number in ((TRAINER_RESOURCE, config.trainer.ranks), (ROLLOUT_RESOURCE, config.rollout.engines))
        for _ in range(number)
    ]
    return list(ray.get(tasks, timeout=120))


def held(claim: Claim, step: int) -> bool:
    """Whether this attempt waits after the step."""
    return claim.attempt == 1 and step == int(os.environ.get("STUB_HOLD", "-1"))


def count(step: int, fence: Fence, store: ObjectStore, log: EventLog, config: RunConfig) -> int:
    """One step, committed."""
    seconds = float(os.environ.get("STUB_STEP_S", "1"))
    time.sleep(seconds)
    fence.check()
    store.put_bytes(key(config.name), json.dumps(step + 1).encode())
    log.write(StepFinished(step + 1, config.trainer.steps, step + 1, seconds, {"reward/mean": (step + 1) / 100}))
    return step + 1


def done(store: ObjectStore, run: str) -> int:
    """Steps that are committed."""
    return int(json.loads(store.get_bytes(key(run)))) if store.exists(key(run)) else 0


def key(run: str) -> str:
    """Where the count is kept."""
    return f"runs/{run}/stub.json"
