"""A model of 100 thousand random parameters that vLLM and transformers load, and other weights for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tidemill.protocols import WeightUpdate

VOCAB = 96
CONTEXT = 256


def make_tiny_model(folder: Path, seed: int, *, tied: bool = True) -> Path:
    """A Llama of 2 layers with its tokenizer, as a Hugging Face folder in float32; it never ends by itself."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    tiny_llama(seed, tied=tied).save_pretrained(folder)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", pad_token="</s>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    fast.save_pretrained(folder)
    return folder


def tiny_llama(seed: int, *, tied: bool = True) -> Any:
    """The model alone; another seed gives other weights of the same shapes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def write_weights(path: Path, seed: int, version: int, *, drop: str = "", rename: str = "") -> WeightUpdate:
    """The weights of another seed as a trainer exports them; without, or with a wrongly named, tensor if asked."""
    state = {name: value for name, value in tiny_llama(seed).state_dict().items() if name != "lm_head.weight"}
    if drop:
        del state[drop]
    if rename:
        state["renamed"] = state.pop(rename)
    save_file({name: value.contiguous() for name, value in state.items()}, path)
    return WeightUpdate(version, str(path), path.stat().st_size)
