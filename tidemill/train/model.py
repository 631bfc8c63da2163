"""The policy's model: loading, unsupported architectures, log-probs of packed rows, and the Hugging Face folder.

Shapes: B rows of T columns, U predicting positions, K target tokens, H hidden size.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tidemill.errors import ModelError
from tidemill.models.hf_config import read_config, refuse_untrainable
from tidemill.train.logprobs import attention_mask, token_log_probs
from tidemill.train.sharding import full_tensor
from tidemill.weights.tensor_files import write_tensors

WEIGHTS = "model.safetensors"
LOGITS_BYTES = 256 << 20
# Tokenizer, chat template and generation config; weights and their index are not copied.
COPIED_SUFFIXES = frozenset({".json", ".jinja", ".model", ".txt"})
WRITTEN = frozenset({"config.json"})
RANDOM = ("drop", "jitter")  # in the names of settings that make training mode random


def load_model(folder: Path, gradient_checkpointing: bool = False) -> Any:
    """The causal language model of a Hugging Face folder, in float32, without dropout.

    Raises:
        ModelError: naming the folder and the cause.
    """
    refuse_untrainable(folder)
    config = disable_dropout(read_config(folder))
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            attn_implementation="sdpa",
            local_files_only=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{folder} cannot be loaded as a causal language model: {error}") from error
    if model.get_output_embeddings().bias is not None:
        raise ModelError(f"{folder}: a language model head with a bias is not supported")
    prepare(model, gradient_checkpointing)
    return model


def load_meta_model(folder: Path, gradient_checkpointing: bool = False) -> Any:
    """What `load_model` returns, on the `meta` device: shapes without values."""
    config = disable_dropout(read_config(folder))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    prepare(model, gradient_checkpointing)
    return model


def prepare(model: Any, gradient_checkpointing: bool) -> None:
    """Set training mode if activations are recomputed, else evaluation mode."""
    model.train(gradient_checkpointing)  # transformers recomputes activations in training mode only
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def disable_dropout(config: Any) -> Any:
    """The config with dropout and router jitter at 0, because the engines compute without them.

    They are set before the model is built: each kind of layer reads them from the config in its own way, and applies
    them in training mode.
    """
    for part in (config, config.get_text_config()):
        for name, value in part.to_dict().items():
            if isinstance(value, float) and any(word in name for word in RANDOM):
                setattr(part, name, 0.0)
    return config


def frozen_copy(model: Any) -> Any:
    return copy.deepcopy(model).requires_grad_(False).eval()


def write_folder(folder: Path | None, source: Path, parameters: Mapping[str, Tensor]) -> None:
    """Write a Hugging Face folder: bfloat16 weights, and everything else from the folder of the original model.

    A head that is tied to the embedding is the same parameter, stored once under the embedding's name. `folder` is None
    on all ranks but the first.
    """
    if folder is not None:
        copy_companions(folder, source)
    write_tensors(folder / WEIGHTS if folder else None, parameters, torch.bfloat16, full_tensor)


def copy_companions(folder: Path, source: Path) -> None:
    """Copy tokenizer and settings of a Hugging Face folder, with the dtype of the new weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        copied = file.suffix in COPIED_SUFFIXES and not file.name.endswith(".index.json")
        if copied and file.name not in WRITTEN:
            shutil.copyfile(file, folder / file.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)  # the older name of `dtype` in transformers
    text = json.dumps(config | {"dtype": "bfloat16"}, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


class Network(nn.Module):
    """A causal language model and the projection of chosen positions onto the vocabulary.

    Both are one module, because a sharded model has its full parameters only during a module's forward pass.
    """

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        """Wrap a model.

        Args:
            model: Hugging Face causal language model, float32.
            dtype: of matrix products; everything else is computed in float32 (autocast).
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
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs of the targets, and the entropies of the distributions that they are from.

        Args:
            ids: `[B, T]` int64, tokens.
            positions: `[B, T]` int64, distance from the root of the tree, see `train.packing`.
            ends: `[B, T]` int64, end of the subtree.
            predictors: `[U]` int64, positions in `[B * T]` that predict a target.
            inverse: `[K]` int64, index into `predictors` for each target.
            target_ids: `[K]` int64.
            temperature: of the distribution.
            entropy_gradient: whether the entropies are differentiated.

        Returns:
            `[K]` float32, twice.
        """
        hidden = self.hidden(ids, positions, attention_mask(ends)).flatten(0, 1)[predictors]
        weight = self.model.get_output_embeddings().weight
        chunk = max(1, LOGITS_BYTES // (4 * weight.shape[0]))
        return token_log_probs(
            hidden,
            weight,
            inverse,
            target_ids,
            temperature=temperature,
            chunk=chunk,
            entropy_gradient=entropy_gradient,
        )

    def hidden(self, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """`[B, T, H]` normalised output of the last layer."""
        with torch.autocast(ids.device.type, self.dtype, enabled=self.dtype != torch.float32):
            output = self.model.base_model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
        hidden: Tensor = output.last_hidden_state
        return hidden.to(self.dtype)
