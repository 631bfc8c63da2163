"""One rank of the policy: forward pass, loss, gradient, optimizer step, and the files of its state.

Each rank computes a part of the rows of a step. Several ranks also shard the parameters (`train.sharding`). A loss is
divided by the denominator of the whole optimizer step, so gradients are summed over ranks, not averaged.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from tidemill.config.algorithm import AlgorithmConfig
from tidemill.config.trainer import TrainerConfig
from tidemill.errors import RunError
from tidemill.models.precision import compute_dtype
from tidemill.observe.meters import Timings
from tidemill.records import Float32Array, Int32Array
from tidemill.train import state
from tidemill.train.batch import MicroBatch
from tidemill.train.correction import Rollouts, correct, diagnostics, log_linear, weight_sums
from tidemill.train.kl import kl_loss
from tidemill.train.losses import policy_loss
from tidemill.train.model import Network, frozen_copy, load_meta_model, load_model, write_folder
from tidemill.train.sharding import World, full_tensor, shard_model
from tidemill.train.version_start import VersionStart

# A sharded forward or backward pass needs all ranks: one without rows computes this, which adds exactly zero.
IDLE = MicroBatch.idle()
SUMS = ("loss", "tokens", "ratio", "clipped", "kl", "entropy")
DIAGNOSTICS = (
    "gap", "kl_rollout", "k3_rollout", "chi2_token", "rollouts", "chi2_sequence", "perplexity", "perplexity_rollout"
)  # fmt: skip
WEIGHTED = ("weight", "weight_squares", "truncated", "rejected")
REFERENCE_SUMS = ("reference",)
# Sum: the name of its mean, what it is a mean over, and its value in a step without tokens.
MEANS = {
    "ratio": ("ratio/mean", "tokens", 1.0),
    "clipped": ("ratio/clip_fraction", "tokens", 0.0),
    "kl": ("kl/old_new", "tokens", 0.0),
    "entropy": ("policy/entropy", "tokens", 0.0),
    "reference": ("kl/reference", "tokens", 0.0),
    "gap": ("correction/old_rollout_gap", "tokens", 0.0),
    "kl_rollout": ("correction/kl", "tokens", 0.0),
    "k3_rollout": ("correction/k3_kl", "tokens", 0.0),
    "chi2_token": ("correction/chi2_token", "tokens", 1.0),
    "chi2_sequence": ("correction/chi2_sequence", "rollouts", 1.0),
    "perplexity": ("correction/perplexity", "rollouts", 1.0),
    "perplexity_rollout": ("correction/rollout_perplexity", "rollouts", 1.0),
    "weight": ("correction/weight_mean", "tokens", 1.0),
    "truncated": ("correction/truncated_ratio", "tokens", 0.0),
    "rejected": ("correction/rejected_ratio", "tokens", 0.0),
}
CHI2 = ("correction/chi2_token", "correction/chi2_sequence")  # E[(pi / beta)^2] - 1


class UpdateMetrics:
    """Running sums; every rank has the same ones, whatever its share of the tokens."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        reference = REFERENCE_SUMS if algorithm.kl_loss_coef else ()
        self.names = SUMS + DIAGNOSTICS + (WEIGHTED if algorithm.corrects else ()) + reference
        self.sums = torch.zeros(len(self.names), dtype=torch.float64)
        self.weight_max = torch.zeros(1, dtype=torch.float64)

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add one micro-batch: a scalar for each of `names`, and `weight_max` if tokens are weighted."""
        self.sums += torch.stack([values[name] for name in self.names]).double().cpu()
        if "weight" in self.names:
            self.weight_max = torch.maximum(self.weight_max, values["weight_max"].double().cpu())

    def all_reduce(self, world: World) -> None:
        self.sums = world.all_reduce(self.sums)
        if "weight" in self.names:
            self.weight_max = world.all_reduce(self.weight_max, dist.ReduceOp.MAX)

    @property
    def totals(self) -> dict[str, float]:
        return dict(zip(self.names, self.sums.tolist(), strict=True))

    def result(self) -> dict[str, float]:
        """`loss`, `tokens`, `rollouts`, `skipped` (1 without tokens, else 0), and means over tokens and rollouts."""
        totals = self.totals
        tokens = totals["tokens"]
        means = {
            metric: totals[name] / totals[by] if totals[by] else empty
            for name, (metric, by, empty) in MEANS.items()
            if name in totals
        }
        means |= {name: means[name] - 1 for name in CHI2}
        if "weight" in totals:
            means["correction/weight_max"] = self.weight_max.item()  # 0 without tokens: below that of any other step
            squares = totals["weight_squares"]
            means["correction/effective_sample_size"] = totals["weight"] ** 2 / (tokens * squares) if squares else 0.0
        counts = {"tokens": tokens, "rollouts": totals["rollouts"], "skipped": float(not tokens)}
        return {"loss": totals["loss"], **counts, **means}


class PolicyRank:
    """The policy on one rank, in float32, with its optimizer."""

    def __init__(
        self,
        model_path: str,
        trainer: TrainerConfig,
        algorithm: AlgorithmConfig,
        *,
        temperature: float,
        seed: int,
        steps_per_version: int = 1,
        world: World | None = None,
    ) -> None:
        """Load the model, connect to the other ranks, shard the parameters and build the optimizer.

        Args:
            model_path: Hugging Face folder.
            trainer: optimizer settings.
            algorithm: loss settings.
            temperature: at which responses are sampled.
            seed: of torch's random number generator.
            steps_per_version: optimizer steps between two weight syncs.
            world: all ranks; None is a single one.

        Raises:
            ModelError: the folder cannot be loaded, or packed training is not exact for its architecture.
        """
        if trainer.threads is not None:
            torch.set_num_threads(trainer.threads)
        torch.manual_seed(seed)
        self.model_path, self.trainer, self.algorithm = Path(model_path), trainer, algorithm
        self.temperature, self.world, self.updates = temperature, world or World(), 0
        self.mean_weight = 1.0  # of the importance weights of the current step
        self.device = self.world.device
        self.dtype = compute_dtype(trainer.precision, self.device)
        load = load_model if self.world.rank == 0 else load_meta_model  # `shard_model` broadcasts the values
        self.model = load(self.model_path, trainer.gradient_checkpointing)
        reference = frozen_copy(self.model) if algorithm.kl_loss_coef > 0 else None
        self.world.init_process_group(trainer.get_timeout_s)
        self.network = self.wrap(self.model)
        self.reference = None if reference is None else self.wrap(reference)
        self.parameters = dict(self.model.named_parameters())
        self.start = VersionStart(self.network, steps_per_version, kept=algorithm.keeps_version_start)
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=trainer.learning_rate, weight_decay=trainer.weight_decay, fused=True
        )

    def wrap(self, model: Any) -> Network:
        network = Network(model, self.dtype)
        if self.world.size == 1:
            return network.to(self.device)
        shard_model(network, self.world, self.dtype)
        return network

    def update(self, micro_batches: Sequence[MicroBatch], denominator: float, version: int = 0) -> dict[str, float]:
        """One optimizer step; all ranks call this at once, each with its own micro-batches.

        If no rank has a target there is no gradient: the step counts and leaves the policy unchanged.

        Args:
            micro_batches: of this rank.
            denominator: of the whole step, `step_denominator`.
            version: that the step trains; a new number begins a new version.

        Returns:
            Over all ranks `grad_norm` (before clipping), `lr` and `UpdateMetrics.result`; of this rank in seconds
            `time/forward`, `time/backward`, `time/optimizer` and, if it needed a pass of its own, `time/old_log_prob`.

        Raises:
            RunError: the gradient is not finite; the parameters are unchanged.
        """
        timings, metrics, rate = Timings(), UpdateMetrics(self.algorithm), self.learning_rate()
        self.start.enter(version)
        starts = self.start_log_probs(micro_batches, timings)
        self.mean_weight = self.step_mean_weight(micro_batches, starts, timings)
        for batch, start in zip(micro_batches, starts, strict=True):
            if len(batch.targets):
                metrics.add(self.backward(batch, denominator, timings, start))
            elif self.world.size > 1:
                self.backward(IDLE, denominator, timings)
        with timings.phase("optimizer"):
            self.start.keep()
            metrics.all_reduce(self.world)
            norm = self.step(rate) if metrics.totals["tokens"] else 0.0
        self.start.leave()
        self.updates += 1
        return {"grad_norm": norm, "lr": rate, **metrics.result(), **timings.metrics()}

    def learning_rate(self) -> float:
        """The learning rate of the next update: linear warm-up, then constant."""
        warmup = self.trainer.warmup_steps
        return self.trainer.learning_rate * min(1.0, (self.updates + 1) / (warmup + 1))

    def start_log_probs(self, micro_batches: Sequence[MicroBatch], timings: Timings) -> Sequence[Float32Array | None]:
        """`[K]` log-probs under the parameters that the version started with; None if they are the current ones."""
        if not self.algorithm.keeps_version_start or self.start.is_current:
            return [None] * len(micro_batches)
        with timings.phase("old_log_prob"), self.start.exchanged():
            return self.log_probs(micro_batches)

    def backward(
        self,
        batch: MicroBatch,
        denominator: float,
        timings: Timings | None = None,
        start: Float32Array | None = None,
    ) -> dict[str, Tensor]:
        """Add the gradient of one micro-batch; returns what `UpdateMetrics.add` takes."""
        timings = timings or Timings()
        with timings.phase("forward"):
            loss, sums = self.loss(batch, denominator, start)
        with timings.phase("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        return {**sums, "loss": loss.detach()}

    def loss(
        self, batch: MicroBatch, denominator: float, start: Float32Array | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of one micro-batch, and the sums of `policy_loss`, `kl_loss` and the correction.

        Args:
            batch: the micro-batch.
            denominator: of the whole step.
            start: `[K]` log-probs under the version's start; None if it is the current policy.
        """
        algorithm, rollouts = self.algorithm, Rollouts.of(self.to_device(batch.targets.rollout))
        log_probs, entropy = self.forward(self.network, batch)
        sampled, advantages, weights = map(
            self.to_device, (batch.targets.old_log_probs, batch.targets.advantages, batch.targets.weights)
        )
        old = self.old_log_probs(batch, log_probs.detach(), sampled, start)
        log_ratio = self.trained(old, log_probs.detach()) - sampled
        sums, factors = diagnostics(log_ratio, sampled, rollouts), weights
        if algorithm.corrects:
            correction, counted = correct(algorithm, log_ratio, rollouts, self.mean_weight)
            factors, sums = weights * correction, sums | counted
        loss, counted = policy_loss(algorithm, log_probs, old, advantages, factors, rollouts, denominator=denominator)
        sums |= counted | {"entropy": entropy.detach().sum()}
        if algorithm.entropy_coef:
            loss = loss - algorithm.entropy_coef * (weights * entropy).sum() / denominator
        if self.reference is not None:
            with torch.no_grad():
                reference, _ = self.forward(self.reference, batch)
            kind = algorithm.kl_loss_type
            term, counted = kl_loss(kind, log_probs, reference, sampled, weights, denominator=denominator)
            loss, sums = loss + algorithm.kl_loss_coef * term, sums | counted
        return loss, sums

    def trained(self, old: Tensor, current: Tensor) -> Tensor:
        """The policy whose distance to the sampling policy is corrected: the current one where `old` is the latter."""
        return current if self.algorithm.old_log_prob == "rollout" else old

    def step_mean_weight(
        self, micro_batches: Sequence[MicroBatch], starts: Sequence[Float32Array | None], timings: Timings
    ) -> float:
        """The mean importance weight of the whole step, by a forward pass; 1 unless weights are normalised by it."""
        if not self.algorithm.rollout_correction.rollout_is_batch_normalize:
            return 1.0
        total = torch.zeros(2, dtype=torch.float64)
        with timings.phase("old_log_prob"):
            for batch, current, start in zip(micro_batches, self.log_probs(micro_batches), starts, strict=True):
                if len(batch.targets):
                    now, sampled = self.to_device(current), self.to_device(batch.targets.old_log_probs)
                    log_ratio = self.trained(self.old_log_probs(batch, now, sampled, start), now) - sampled
                    rollouts = Rollouts.of(self.to_device(batch.targets.rollout))
                    total += weight_sums(self.algorithm, log_ratio, rollouts).double().cpu()
        weight, count = self.world.all_reduce(total).tolist()
        return weight / count if weight else 1.0

    def old_log_probs(self, batch: MicroBatch, current: Tensor, sampled: Tensor, start: Float32Array | None) -> Tensor:
        """`[K]` log-probs in the denominator of the ratio, as `algorithm.old_log_prob` says."""
        if self.algorithm.old_log_prob == "rollout":
            return sampled
        if self.algorithm.proximal == "loglinear":
            versions = self.to_device(batch.targets.versions)
            return log_linear(current, sampled, versions, version=self.start.version, done=self.start.done)
        return current if start is None else self.to_device(start)

    def forward(self, network: Network, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """`[K]` float32 log-probs of the targets at the sampling temperature, and `[K]` entropies."""
        arrays = (batch.token_ids, batch.positions, batch.ends, *batch.predictors(), batch.targets.target_ids)
        result: tuple[Tensor, Tensor] = network(
            *(self.to_device(array).long() for array in arrays), self.temperature, self.algorithm.entropy_coef != 0
        )
        return result

    def to_device(self, array: NDArray[Any]) -> Tensor:
        return torch.tensor(array, device=self.device)  # a copy, because Ray's arrays are read-only

    def step(self, rate: float) -> float:
        """Clip the gradient, which is reduced over ranks already, and update; returns its norm before clipping."""
        norm = full_tensor(get_total_norm([p.grad for p in self.parameters.values() if p.grad is not None]))
        if not math.isfinite(norm.item()):
            self.optimizer.zero_grad(set_to_none=True)
            raise RunError(
                f"the gradient norm of optimizer step {self.updates + 1} is {norm.item()}; the parameters are "
                "unchanged. Lower trainer.learning_rate or trainer.max_grad_norm, or check the rewards of this step."
            )
        if norm > self.trainer.max_grad_norm:
            clip_grads_with_norm_(self.parameters.values(), self.trainer.max_grad_norm, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm.item()

    @torch.no_grad()
    def log_probs(self, micro_batches: Sequence[MicroBatch]) -> list[Float32Array]:
        """`[K]` log-probs of each micro-batch under the current parameters, at the sampling temperature."""
        return [self.batch_log_probs(batch) for batch in micro_batches]

    def batch_log_probs(self, batch: MicroBatch) -> Float32Array:
        """`[K]` of one micro-batch; without targets, this rank only takes part in the passes of the others."""
        if len(batch.targets):
            log_probs: Float32Array = self.forward(self.network, batch)[0].cpu().numpy()
            return log_probs
        if self.world.size > 1:
            self.forward(self.network, IDLE)
        return np.zeros(0, np.float32)

    @torch.no_grad()
    def score(self, token_ids: Int32Array) -> Float32Array:
        """`[T-1]` log-probs of `token_ids[1:]` given the tokens before each, at temperature 1; all ranks at once."""
        ids = self.to_device(token_ids).long()
        positions = torch.arange(len(ids), device=self.device)
        ends = torch.full_like(ids, len(ids))
        log_probs, _ = self.network(
            ids[None], positions[None], ends[None], positions[:-1], positions[:-1], ids[1:], 1.0
        )
        scores: Float32Array = log_probs.cpu().numpy()
        return scores

    def save_model(self, folder: str | Path) -> None:
        write_folder(self.written(folder), self.model_path, self.parameters)

    def save_state(self, folder: str | Path) -> None:
        """Write parameters, optimizer, progress and random state; the files do not depend on the number of ranks."""
        state.save_state(self.written(folder), self.parameters, self.optimizer, self.updates)

    def written(self, path: str | Path) -> Path | None:
        return Path(path) if self.world.rank == 0 else None

    def load_state(self, folder: str | Path) -> None:
        """Continue from what `save_state` wrote; the updates that follow are those of an uninterrupted run."""
        self.updates = state.load_state(Path(folder), self.parameters, self.optimizer)
        self.start.forget()

    def peak_memory_bytes(self) -> int:
        """Peak memory so far: of tensors on a GPU, else of this process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def close(self) -> None:
        self.world.destroy_process_group()
