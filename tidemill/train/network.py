"""What the policy computes: from packed rows to the log-probs of their targets.

Shapes: B rows of T columns, U predicting positions, K target tokens, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tidemill.train.logprobs import attention_mask, token_log_probs

LOGITS_BYTES = 256 << 20


class Network(nn.Module):
    """A causal language model with the projection onto chosen tokens.

    One module, because a model whose parameters are spread over ranks has them only while a module's forward runs.
    """

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        """Wrap a model.

        Args:
            model: Hugging Face causal language model, float32.
            dtype: of matrix products; all else is computed in float32 (autocast).
        """
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        ends: Tensor,
        predictors: Tensor,
        inverse: Tensor,
        target_ids: Tensor,
        temperature: float,
    ) -> Tensor:
        """Log-probs of the targets.

        Args:
            ids: `[B, T]` int64, tokens.
            positions: `[B, T]` int64, distance of each from the root of its tree, see `train.tree`.
            ends: `[B, T]` int64, where the subtree of each ends.
            predictors: `[U]` int64, positions in `[B * T]` whose output is needed.
            inverse: `[K]` int64, which of the predictors predicts a target.
            target_ids: `[K]` int64.
            temperature: of the distribution.

        Returns:
            `[K]` float32.
        """
        hidden = self.hidden(ids, positions, attention_mask(ends)).flatten(0, 1)[predictors]
        weight = self.model.get_output_embeddings().weight
        chunk = max(1, LOGITS_BYTES // (4 * weight.shape[0]))
        return token_log_probs(hidden, weight, inverse, target_ids, temperature=temperature, chunk=chunk)

    def hidden(self, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """`[B, T, H]` output of the last layer, normalised."""
        with torch.autocast(ids.device.type, self.dtype, enabled=self.dtype != torch.float32):
            output = self.model.base_model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
        hidden: Tensor = output.last_hidden_state
        return hidden.to(self.dtype)
