"""The trainer ranks, each in a process of its own."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import ray

from tidemill.actors.call import IO, WEIGHTS, call
from tidemill.actors.placement import rank_placement
from tidemill.cluster.local import weights_folder
from tidemill.config.run import RunConfig
from tidemill.models.locate import fetch_model_once
from tidemill.observe.meters import Timings
from tidemill.records import Float32Array, Int32Array
from tidemill.store.checkpoint import Checkpoints, open_checkpoints, restored_folder, staging_folder
from tidemill.store.download_once import download_once, remove_download
from tidemill.store.lease import Claim, Fence
from tidemill.store.object_store import ObjectStore
from tidemill.store.server import open_store
from tidemill.train.batch import MicroBatch
from tidemill.weights.manifest import weights_prefix
from tidemill.weights.transport import Publication, check_room, room_in
from tidemill.weights.upload import WeightUploader

if TYPE_CHECKING:
    from tidemill.train.policy import PolicyRank
    from tidemill.weights.tensor_files import MappedWeights

P = ParamSpec("P")
T = TypeVar("T")
CONCURRENCY_GROUPS = {IO: 1, WEIGHTS: 1}
WRITTEN = "written.safetensors"
IO_TIMEOUT_S = 3600.0  # of a checkpoint or a model on its way to or from the store


class RankActor:
    """One trainer rank: its share of work and parameters, and on rank 0 the checkpoints.

    Args:
        config: of the run.
        model_path: folder of the model; None downloads it to this pod, see `models.locate.fetch_model_once`.
        rank: of this process.
        claim: to the lease without which nothing is written to the store; None needs none.
    """

    policy: PolicyRank
    files: MappedWeights

    def __init__(self, config: RunConfig, model_path: str | None, rank: int, claim: Claim | None) -> None:
        self.config, self.model_path, self.rank, self.claim = config, model_path, rank, claim
        self.staging, self.restored = staging_folder(config, rank), restored_folder(config)
        self.uploader = WeightUploader(weights_prefix(config.name), config.sync.full_every)

    def meeting_place(self) -> str:
        with socket.socket() as probe:
            probe.bind(("", 0))  # a free port
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def load(self, init_method: str | None) -> None:
        """Load the policy; not in the constructor, whose errors would look like the death of a process.

        Args:
            init_method: where the ranks meet, if there are several.
        """
        from tidemill.train.policy import PolicyRank
        from tidemill.train.sharding import World
        from tidemill.weights.tensor_files import MappedWeights

        remove_download(self.restored)  # of an attempt that was killed: the same version may be committed anew since
        self.files = MappedWeights()
        self.policy = PolicyRank(
            self.model_path or str(fetch_model_once(self.config).path),
            self.config.trainer,
            self.config.algorithm,
            temperature=self.config.rollout.temperature,
            steps_per_version=self.config.updates_per_version,
            seed=self.config.seed,
            world=World(self.rank, self.config.trainer.ranks, init_method),
        )

    def update(self, batches: Sequence[MicroBatch], denominator: float, version: int) -> dict[str, float]:
        return self.policy.update(batches, denominator, version)

    def score(self, token_ids: Int32Array) -> Float32Array:
        return self.policy.score(token_ids)

    def export(self, path: Path) -> int:
        """Write the weights for the engines, in the engines' precision; rank 0 writes, and returns the bytes."""
        from tidemill.models.precision import compute_dtype
        from tidemill.train.sharding import full_tensor

        dtype = compute_dtype(self.config.rollout.dtype, self.policy.device)
        return self.files.write(None if self.rank else path, self.policy.parameters, dtype, full_tensor)

    def write_weights(self) -> None:
        """Write the weights to a file of this pod; ranks other than 0 only take part."""
        folder = weights_folder(self.config)
        if self.rank:
            self.export(folder / WRITTEN)
            return
        folder.mkdir(parents=True, exist_ok=True)
        check_room(folder, self.uploader.nbytes)
        with room_in(folder, self.uploader.nbytes):
            self.export(folder / WRITTEN)

    @ray.method(concurrency_group=WEIGHTS)
    def upload_weights(self, version: int) -> Publication:
        timings = Timings()
        with timings.phase("sync_upload"), self.leased_store() as store:
            publication = self.uploader.publish(store, version, weights_folder(self.config) / WRITTEN)
        return replace(publication, metrics={**publication.metrics, **timings.metrics()})

    @ray.method(concurrency_group=WEIGHTS)
    def upload_snapshot(self) -> Publication:
        """Upload the newest version again, as a full snapshot; no other publication is made meanwhile."""
        with self.leased_store() as store:
            return self.uploader.snapshot(store)

    @contextmanager
    def leased_store(self) -> Iterator[ObjectStore]:
        """The run's object store, which only the attempt that holds the lease may write to."""
        with open_store(self.config.store, self.config.output) as store:
            if self.claim is not None:
                Fence(store, self.config.name, self.claim).check()
            yield store

    def snapshot(self) -> None:
        """Rank 0 writes everything a restart needs to its staging folder; training may go on when this returns."""
        if self.rank == 0:
            shutil.rmtree(self.staging, ignore_errors=True)
            self.staging.mkdir(parents=True)
        self.policy.save_state(self.staging)

    @ray.method(concurrency_group=IO)
    def upload(self, version: int, state: Mapping[str, object]) -> str:
        """Commit the snapshot and remove it; returns the checkpoint's URI."""
        with self.checkpoints() as checkpoints:
            uri = checkpoints.commit(version, self.staging, state)
        shutil.rmtree(self.staging)
        return uri

    def restore(self, version: int) -> None:
        """Go on from a committed checkpoint, which is downloaded once for all ranks of a pod."""
        with self.checkpoints() as checkpoints:
            download_once(self.restored, str(version), lambda: checkpoints.load(version, self.restored))
        self.policy.load_state(self.restored)

    def forget_restored(self) -> None:
        remove_download(self.restored)

    def publish_model(self, version: int) -> str:
        """Write the Hugging Face folder of the policy to the run's folder and to the store; rank 0 returns its URI."""
        folder = self.config.folder / "model"
        self.policy.save_model(folder)
        if self.rank:
            return ""
        with self.checkpoints() as checkpoints:
            return checkpoints.publish_model(version, folder)

    def checkpoints(self) -> AbstractContextManager[Checkpoints]:
        return open_checkpoints(self.config, self.claim)


def on_ranks(
    method: Callable[Concatenate[RankActor, P], T], timeout_s: float | None, *, first: bool = False
) -> Callable[Concatenate[RemoteRanks, P], Coroutine[Any, Any, T]]:
    """The method of `RemoteRanks` that calls the method of the same name on every rank; returns what rank 0 answers.

    Args:
        method: of the ranks.
        timeout_s: None where the caller has a deadline of its own.
        first: call rank 0 only.
    """

    @wraps(method)
    async def forwarded(self: RemoteRanks, /, *args: P.args, **kwargs: P.kwargs) -> T:
        actors = self.actors[:1] if first else self.actors
        answers: list[T] = await self.answers(
            [getattr(a, method.__name__).remote(*args, **kwargs) for a in actors], timeout_s
        )
        return answers[0]

    return forwarded


@dataclass(frozen=True, slots=True)
class RemoteRanks:
    """The trainer ranks: `train.trainer.Ranks` and `weights.transport.WeightSource`.

    All ranks do what needs the parameters. Rank 0 alone does the rest.
    """

    actors: tuple[Any, ...]
    update_timeout_s: float

    score = on_ranks(RankActor.score, None)
    export = on_ranks(RankActor.export, None)
    write_weights = on_ranks(RankActor.write_weights, None)
    upload_weights = on_ranks(RankActor.upload_weights, None, first=True)
    upload_snapshot = on_ranks(RankActor.upload_snapshot, None, first=True)

    snapshot = on_ranks(RankActor.snapshot, IO_TIMEOUT_S)
    upload = on_ranks(RankActor.upload, IO_TIMEOUT_S, first=True)
    publish_model = on_ranks(RankActor.publish_model, IO_TIMEOUT_S)
    _restore = on_ranks(RankActor.restore, IO_TIMEOUT_S)
    _forget_restored = on_ranks(RankActor.forget_restored, IO_TIMEOUT_S)
    _load = on_ranks(RankActor.load, None)
    _meeting_place = on_ranks(RankActor.meeting_place, None, first=True)

    async def load(self) -> None:
        await self._load(await self._meeting_place() if len(self.actors) > 1 else None)

    async def restore(self, version: int) -> None:
        await self._restore(version)
        await self._forget_restored()

    async def update(
        self, batches: Sequence[Sequence[MicroBatch]], denominator: float, version: int
    ) -> Mapping[str, float]:
        pending = [a.update.remote(b, denominator, version) for a, b in zip(self.actors, batches, strict=True)]
        answers: list[dict[str, float]] = await self.answers(pending, self.update_timeout_s)
        return answers[0]

    async def answers(self, pending: Sequence[Awaitable[T]], timeout_s: float | None) -> list[T]:
        return await asyncio.gather(*(call(f"trainer rank {n}", p, timeout_s) for n, p in enumerate(pending)))


def start_ranks(config: RunConfig, model_path: str | None, claim: Claim | None = None) -> RemoteRanks:
    # Ray sets OMP_NUM_THREADS to the actor's CPUs otherwise; threads that spin would take the cores from the engines.
    threads = config.trainer.threads or len(os.sched_getaffinity(0))
    options = rank_placement(config).options({"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"})
    shell = ray.remote(concurrency_groups=CONCURRENCY_GROUPS, **options)(RankActor)
    actors = tuple(shell.remote(config, model_path, rank, claim) for rank in range(config.trainer.ranks))
    return RemoteRanks(actors, config.trainer.get_timeout_s)
