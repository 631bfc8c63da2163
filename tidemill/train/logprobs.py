"""Log-probs of target tokens: the attention mask of packed rows, and a vocabulary projection in chunks.

Shapes: B rows of T columns, U predicting positions, K target tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def attention_mask(ends: Tensor) -> Tensor:
    """`[B, 1, T, T]` bool: column i attends to column j if and only if `j <= i < ends[j]` (see `train.packing`).

    A padding column j has `ends[j] = j + 1`: it attends to itself, so that no softmax is empty, and no other column
    attends to it.

    Args:
        ends: `[B, T]` integer.
    """
    columns = torch.arange(ends.shape[1], device=ends.device)
    below_end = columns[:, None] < ends[:, None, None, :]
    return below_end & (columns[:, None] >= columns)


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    predictor: Tensor,
    target_ids: Tensor,
    *,
    temperature: float,
    chunk: int,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-softmax of the logits `hidden @ weight.T / temperature` at the target tokens, and the entropy there.

    At most `chunk` positions have logits in memory at a time. With more positions than that, or with a gradient of the
    entropy, the backward pass computes the logits again; otherwise it uses the probabilities of the forward pass. The
    projection is computed in the dtype of `hidden`, everything else in float32.

    Args:
        hidden: `[U, H]`, the positions that predict a target.
        weight: `[V, H]` of the language model's head.
        predictor: `[K]` int64, the position in `hidden` that predicts each target; several targets may share one.
        target_ids: `[K]` int64.
        temperature: of the sampling distribution.
        chunk: number of positions per chunk.
        entropy_gradient: whether the entropy is differentiated.

    Returns:
        `[K]` float32 log-probs, and `[K]` float32 entropies in nats of the distributions that the targets are from.
    """
    log_probs, entropy = TokenLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, predictor, target_ids, temperature, chunk, entropy_gradient
    )
    return log_probs, entropy


class TokenLogProbs(torch.autograd.Function):
    """The autograd function of `token_log_probs`.

    With p the softmax of position u, H its entropy, and g and h the incoming gradients of log-probs and entropies,
    summed over the targets that u predicts, the gradient of u's logits is

        sum(g onehot) - sum(g) p - h p (log p + H)

    The first term is projected separately, because it only involves the rows of the target tokens; this saves one write
    of all logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        predictor: Tensor,
        target_ids: Tensor,
        temperature: float,
        chunk: int,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        scaled, head = (hidden.float() / temperature).to(hidden.dtype), weight.to(hidden.dtype)
        log_probs = torch.empty(len(predictor), device=hidden.device)
        entropies = torch.empty(len(hidden), device=hidden.device)
        recomputed = entropy_gradient or len(hidden) > chunk
        kept = []
        for start in range(0, len(hidden), chunk):
            logits = (scaled[start : start + chunk] @ head.T).float()
            chosen, local = targets_of(predictor, start, len(logits))
            picked = logits[local, target_ids[chosen]]
            top, index = logits.max(dim=-1, keepdim=True)
            probs = torch.softmax(logits, dim=-1)
            # log sum exp = max - log p(max); p(max) is at least 1 / V, so nothing underflows.
            log_sum_exp = (top - probs.gather(-1, index).log()).squeeze(-1)
            log_probs[chosen] = picked - log_sum_exp[local]
            entropies[start : start + chunk] = log_sum_exp - torch.linalg.vecdot(probs, logits)
            kept.append(log_sum_exp if recomputed else probs.to(hidden.dtype))
        ctx.save_for_backward(scaled, weight, predictor, target_ids, entropies, *kept)
        ctx.temperature, ctx.chunk, ctx.recomputed = temperature, chunk, recomputed
        ctx.entropy_gradient = entropy_gradient
        entropy = entropies[predictor]
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None, None, None]:
        """Gradients of `hidden` and `weight`, summed over the chunks in float32."""
        grad, entropy_grad = gradients
        scaled, weight, predictor, target_ids, entropies, *kept = ctx.saved_tensors
        head = weight.to(scaled.dtype)
        total = torch.zeros(len(scaled), device=grad.device).index_add_(0, predictor, grad)
        spread = torch.zeros_like(total)
        if ctx.entropy_gradient:
            spread.index_add_(0, predictor, entropy_grad)
        pulled = -(total[:, None] * scaled.float())
        grad_hidden = torch.zeros(scaled.shape, device=grad.device)
        grad_weight = torch.zeros(weight.shape, device=grad.device)
        for start, saved in zip(range(0, len(scaled), ctx.chunk), kept, strict=True):
            part = slice(start, start + ctx.chunk)
            if ctx.entropy_gradient:
                log_p = (scaled[part] @ head.T).float().sub_(saved[:, None])
                factor = total[part, None] + spread[part, None] * (log_p + entropies[part, None])
                pull = factor.mul_(log_p.exp_()).neg_().to(scaled.dtype)
                grad_hidden[part] = (pull @ head).float()
                accumulate(grad_weight, pull.T, scaled[part])
                continue
            if ctx.recomputed:
                logits = (scaled[part] @ head.T).float()
                probs = logits.sub_(saved[:, None]).exp_().to(scaled.dtype)
            else:
                probs = saved
            grad_hidden[part] = -(total[part, None] * (probs @ head).float())
            accumulate(grad_weight, probs.T, pulled[part].to(scaled.dtype))
        grad_hidden.index_add_(0, predictor, grad[:, None] * weight[target_ids].float())
        grad_weight.index_add_(0, target_ids, grad[:, None] * scaled[predictor].float())
        own = (grad_hidden / ctx.temperature).to(scaled.dtype), grad_weight.to(weight.dtype)
        return *own, None, None, None, None, None


def targets_of(predictor: Tensor, start: int, length: int) -> tuple[Tensor, Tensor]:
    """The targets that positions `[start, start + length)` predict, and the position of each, relative to `start`."""
    chosen = ((predictor >= start) & (predictor < start + length)).nonzero().squeeze(-1)
    return chosen, predictor[chosen] - start


def accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total += left @ right`, where the factors may have another dtype than `total`."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
