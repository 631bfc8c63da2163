"""What `config.json` of a model says before anything is loaded."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tidemill.errors import ModelError
from tidemill.models.hf_config import UNSUPPORTED_TYPES, context_of, refuse_untrainable, vocab_size_of

LLAMA = {"model_type": "llama", "vocab_size": 97, "max_position_embeddings": 64}
CHECK = """
import importlib.machinery, sys
from pathlib import Path
find = importlib.machinery.PathFinder.find_spec
hidden = ("torch", "vllm", "ray")
def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in hidden else find(name, path, target)
importlib.machinery.PathFinder.find_spec = find_spec
from tidemill.models.hf_config import refuse_untrainable
refuse_untrainable(Path(sys.argv[1]))
print("torch" in sys.modules)
"""


def described(folder: Path, **settings: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def test_a_plain_model_is_accepted_and_says_its_sizes(tmp_path: Path) -> None:
    folder = described(tmp_path, **LLAMA)
    refuse_untrainable(folder)
    assert (vocab_size_of(folder), context_of(folder)) == (97, 64)


def test_a_model_is_checked_where_torch_is_not_installed(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", CHECK, str(described(tmp_path, **LLAMA))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, r"is quantised .* quantization_config \(fp8\)"),
        ({"quantization_config": {"quant_algo": "NVFP4"}}, r"is quantised .* quantization_config \(NVFP4\)"),
        ({"compression_config": {"format": "pack"}}, r"is quantised .* quantization_config \(of unknown method\)"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, r"quantization_config \(awq\)"),
        ({"model_type": "unheard-of"}, "config.json is not that of a model of transformers"),
        ({"model_type": "t5"}, "model_type = t5 is not a causal language model"),
        ({"model_type": "mamba2"}, "model_type = mamba2 cannot be trained: its layers have a state"),
        ({"model_type": "bloom"}, "model_type = bloom cannot be trained: it has no scaled dot-product attention"),
        ({"model_type": "phi"}, "model_type = phi cannot be trained: its language model head has a bias"),
        ({"model_type": "phimoe", "lm_head_bias": True}, "cannot be trained with lm_head_bias = True"),
    ],
)
def test_what_cannot_be_trained_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        refuse_untrainable(described(tmp_path, **LLAMA | settings))


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quantize_config.json", "quant_config.json"])
def test_the_file_of_an_older_quantisation_is_refused(name: str, tmp_path: Path) -> None:
    (described(tmp_path, **LLAMA) / name).write_text("{}")
    with pytest.raises(ModelError, match=f"is quantised and cannot be trained: it has {name}"):
        refuse_untrainable(tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # in files of old models
def test_unsupported_types_are_those_of_transformers() -> None:
    listed = [set(types.split()) for types in UNSUPPORTED_TYPES.values()]
    stateful, without_sdpa, without_positions, biased = listed
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        model = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[kind]]
        found = [
            model._is_stateful,
            not model._supports_sdpa,
            "position_ids" not in inspect.signature(model.forward).parameters,
        ]
        first = found.index(True) if any(found) else None
        assert [kind in types for types in listed[:3]] == [place == first for place in range(3)], kind
    for kind in biased:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind]())
        assert model.get_output_embeddings().bias is not None, kind
    assert sum(map(len, listed)) == len(stateful | without_sdpa | without_positions | biased)
