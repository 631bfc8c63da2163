from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from train_rig import batches_of, make_rank, random_advantages, random_groups, save_llama
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma3Config,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from tidemill.errors import ModelError
from tidemill.train.model import load_meta_model, load_model
from tidemill.weights.tensor_files import MappedWeights, write_tensors


def test_export_leaves_out_the_tied_head(llama: Path, tmp_path: Path) -> None:
    rank = make_rank(llama)
    path = tmp_path / "weights.safetensors"
    nbytes = MappedWeights().write(path, rank.parameters, torch.bfloat16)
    tensors = load_file(path)
    assert tensors.keys() == load_file(llama / "model.safetensors").keys()
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert nbytes == path.stat().st_size
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_export_keeps_an_untied_head(tmp_path: Path) -> None:
    rank = make_rank(save_llama(tmp_path / "model", tied=False))
    MappedWeights().write(tmp_path / "weights", rank.parameters, torch.float32)
    assert torch.equal(load_file(tmp_path / "weights")["lm_head.weight"], rank.model.lm_head.weight)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    write_tensors(path, {"a": torch.ones(2)}, torch.float32)
    meta = torch.empty(2, device="meta")
    with pytest.raises((RuntimeError, NotImplementedError)):
        write_tensors(path, {"a": meta}, torch.float32)
    assert load_file(path)["a"].tolist() == [1, 1]
    assert len(list(tmp_path.iterdir())) == 1


def test_transformers_loads_a_saved_model(llama: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "old.safetensors.index.json"):
        if not (llama / name).exists():
            (llama / name).write_text("{}")
    rank, groups = make_rank(llama), random_groups(2)
    rank.update(batches_of(groups, random_advantages(groups), 500)[0], 20.0)
    rank.save_model(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, rank.parameters[name].bfloat16()), name
    names = {path.name for path in tmp_path.iterdir()}
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json"} < names
    assert "old.safetensors.index.json" not in names


@pytest.mark.parametrize("content", [None, "{", '{"model_type": "unheard-of"}', '{"model_type": "llama"}'])
def test_a_folder_without_a_model_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "setting",
    [
        {"final_logit_softcapping": 30.0},
        {"sliding_window": 8},
        {"layer_types": ["sliding_attention", "full_attention"]},
    ],
)
def test_models_that_packing_does_not_compute_exactly_are_refused(llama: Path, tmp_path: Path, setting: dict) -> None:
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | setting))
    with pytest.raises(ModelError, match=next(iter(setting))):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "setting", [{"layer_types": ["sliding_attention", "full_attention"]}, {"final_logit_softcapping": 30.0}]
)
def test_settings_of_a_nested_language_model_are_refused_too(tmp_path: Path, setting: dict) -> None:
    text = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "final_logit_softcapping": None} | setting
    Gemma3Config(text_config=text).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=next(iter(setting))):
        load_model(tmp_path)


def test_a_model_with_recurrent_layers_is_refused(tmp_path: Path) -> None:
    """Its config says nothing of sliding windows or layer types, and an attention mask does not hold its state back."""
    attention = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    mamba = {"mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16, "mamba_d_state": 8}
    config = FalconH1Config(vocab_size=97, num_key_value_heads=2, **attention, **mamba)
    FalconH1ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"model_type = falcon_h1 cannot be trained: its layers have a state"):
        load_model(tmp_path)


def falcon(folder: Path, **settings: bool) -> Path:
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    FalconForCausalLM(FalconConfig(vocab_size=97, **sizes, **settings)).save_pretrained(folder)
    return folder


def test_a_model_without_position_ids_is_refused(tmp_path: Path) -> None:
    """ALiBi takes the distance of two tokens from their columns, which in a tree of responses is another one."""
    with pytest.raises(ModelError, match=r"cannot be trained with alibi = True: packed training needs .* position ids"):
        load_model(falcon(tmp_path / "alibi", alibi=True))
    assert load_model(falcon(tmp_path / "rotary", alibi=False)).config.rotary


def opt(folder: Path) -> None:
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 32, "num_attention_heads": 2}
    config = OPTConfig(vocab_size=97, num_hidden_layers=2, dropout=0.5, attention_dropout=0.5, layerdrop=0.5, **sizes)
    OPTForCausalLM(config).save_pretrained(folder)


def mixtral(folder: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = MixtralConfig(
        vocab_size=97, num_hidden_layers=2, num_local_experts=4, router_jitter_noise=0.5, initializer_range=0.3, **sizes
    )
    MixtralForCausalLM(config).save_pretrained(folder)


@pytest.mark.parametrize("save", [opt, mixtral])
def test_no_forward_pass_is_random_whatever_the_config_says(tmp_path: Path, save: Callable[[Path], None]) -> None:
    """Activations are recomputed in training mode only, where layers have dropout and routers jitter."""
    save(tmp_path)
    groups = random_groups(2)
    (batches,) = batches_of(groups, random_advantages(groups), 500)
    plain, checkpointing = (make_rank(tmp_path, gradient_checkpointing=value) for value in (False, True))
    expected = plain.log_probs(batches)[0]
    for policy in (checkpointing, checkpointing):
        torch.testing.assert_close(policy.forward(policy.network, batches[0])[0].detach().numpy(), expected)
    config = json.loads((tmp_path / "config.json").read_text())
    meta = load_meta_model(tmp_path, gradient_checkpointing=True)
    assert meta.training and 0.5 in config.values() and 0.5 not in meta.config.to_dict().values()
