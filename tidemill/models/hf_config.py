"""The JSON files of a Hugging Face model: sizes, what cannot be trained, and which files hold the weights. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidemill.errors import ModelError

# Settings that change the logits between the last hidden state and the softmax.
LOGIT_SETTINGS = ("final_logit_softcapping", "logits_scaling", "logit_scale")
# Files in which older tools describe a quantised model.
QUANTISED_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
ADAPTER = "adapter_config.json"
INDEX = "model.safetensors.index.json"
# Types of causal language models in transformers that packed training cannot compute exactly, by what is wrong.
UNSUPPORTED_TYPES = {
    "its layers have a state from token to token, which ignores the attention mask": """
    bamba deepseek_v4 falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear mamba mamba2 nemotron_h
    olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text
    recurrent_gemma rwkv xlstm zamba zamba2 zaya
    """,
    "it has no scaled dot-product attention": """
    big_bird bigbird_pegasus bloom codegen cpmant git got_ocr2 gpt_neo gpt_neox_japanese gpt_oss gptj
    granite_swa granitemoe_swa hy_v4 megatron-bert mimo_v2_flash mpt mvp openai-gpt prophetnet reformer rembert
    roformer trocr xglm xlm xlnet
    """,
    "it does not accept position ids": """
    bart blenderbot blenderbot-small marian mbart musicgen musicgen_melody pegasus plbart whisper
    """,
    "its language model head has a bias": """
    bert bert-generation camembert ctrl data2vec-text electra ernie modernbert-decoder phi roberta
    roberta-prelayernorm roc_bert xlm-roberta xlm-roberta-xl xmod
    """,
}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a model folder.

    Raises:
        ModelError: there is no such file, or it has another form.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(tree, dict):
        raise ModelError(f"{path} cannot be read: it is not a JSON object")
    return tree


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers loads: `model.safetensors`, or the shards of the index.

    A folder may have other files with the same weights, such as Mistral's `consolidated.safetensors`.

    Raises:
        ModelError: the index cannot be read.
    """
    single, index = folder / "model.safetensors", folder / INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        return []
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict):
        raise ModelError(f"{index} cannot be read: it has no weight_map")
    return [folder / name for name in sorted(set(shards.values()))]


def read_config(folder: Path) -> Any:
    """The `PretrainedConfig` of a model, with every default.

    Raises:
        ModelError: transformers does not know the model, or a setting is wrong.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise ModelError(f"{folder}/config.json is not that of a model of transformers: {error}") from error


def context_of(folder: Path) -> int | None:
    """Tokens that a model can attend to; None if its configuration does not say."""
    return size_of(folder, "max_position_embeddings")


def heads_of(folder: Path) -> int | None:
    """Attention heads of a layer; None if its configuration does not say."""
    return size_of(folder, "num_attention_heads")


def vocab_size_of(folder: Path) -> int | None:
    """Rows of a model's embedding; None if its configuration does not say."""
    return size_of(folder, "vocab_size")


def size_of(folder: Path, name: str) -> int | None:
    """An integer of the language model, from its `config.json`.

    Raises:
        ModelError: there is no such file, or it is no JSON object.
    """
    tree = read_json(folder / "config.json")
    text = tree.get("text_config")  # of the language part of a multimodal model
    size = (text if isinstance(text, dict) else tree).get(name)
    return size if isinstance(size, int) else None


def refuse_untrainable(folder: Path) -> None:
    """Refuse a model that cannot be trained, from the settings in its folder.

    Raises:
        ModelError: naming the file and the setting.
    """
    refuse_quantised(folder)
    config = read_config(folder)
    text = config.get_text_config()
    refuse_type(folder, {config.model_type, text.model_type})
    refuse_settings(folder, config.to_dict() | text.to_dict())


def refuse_quantised(folder: Path) -> None:
    """Refuse quantised weights: training updates float weights, and the exported model would still claim the format.

    Raises:
        ModelError: naming the method.
    """
    tree = read_json(folder / "config.json")
    parts = [tree, *(part for part in tree.values() if isinstance(part, dict))]
    names = ("quantization_config", "compression_config")
    found = next((part[name] for part in parts for name in names if part.get(name)), None)
    file = next((name for name in QUANTISED_FILES if (folder / name).is_file()), None)
    if found is None and file is None:
        return
    method = found.get("quant_method") or found.get("quant_algo") if isinstance(found, dict) else None
    where = f"config.json has a quantization_config ({method or 'of unknown method'})" if found else f"it has {file}"
    fix = "Name the model that it was quantised from, in bfloat16, float16 or float32."
    raise ModelError(f"{folder} is quantised and cannot be trained: {where}. {fix}")


def refuse_type(folder: Path, types: set[str]) -> None:
    """Refuse a type of model that is no causal language model, or for which a packed row is never exact.

    Raises:
        ModelError: naming the type and the cause.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    named = " / ".join(sorted(types))
    if not types & MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys():
        raise ModelError(f"{folder}: model_type = {named} is not a causal language model of transformers")
    for cause, listed in UNSUPPORTED_TYPES.items():
        if types & set(listed.split()):
            raise ModelError(f"{folder}: model_type = {named} cannot be trained: {cause}. Use another model.")


def refuse_settings(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse settings for which a packed row (full attention, position ids, plain projection) is not exact.

    Raises:
        ModelError: naming the setting.
    """
    found = [name for name in LOGIT_SETTINGS if config.get(name) is not None]
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        found.append("layer_types")
    elif config.get("sliding_window") is not None and config.get("use_sliding_window", True):
        found.append("sliding_window")
    # The bias of ALiBi depends on the columns of a row, not on the positions of a tree.
    found += [name for name in ("alibi", "lm_head_bias") if config.get(name)]
    if found:
        settings = ", ".join(f"{name} = {config[name]!r}" for name in found)
        needed = "packed training needs full attention, position ids and plain logits"
        raise ModelError(f"{folder} cannot be trained with {settings}: {needed}")
