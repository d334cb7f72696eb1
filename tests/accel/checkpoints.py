"""Random Qwen3 checkpoints, written with transformers' own config and model classes."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

_BASE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}

# What of a config each name adds to _BASE. Together they use every field that may differ between checkpoints;
# `rope_theta` and `rope_scaling` at the top are the spelling of transformers 4, `rope_parameters` that of 5.
CONFIGS: dict[str, dict[str, Any]] = {
    "untied": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "tied-mqa-3-layers": {"tie_word_embeddings": True, "num_key_value_heads": 1, "num_hidden_layers": 3},
    "bias-mha": {"attention_bias": True, "num_key_value_heads": 4},
    "wide-heads-bias-tied": {"head_dim": 32, "attention_bias": True, "tie_word_embeddings": True},
    "odd-sizes": {
        "vocab_size": 131,
        "hidden_size": 60,
        "intermediate_size": 90,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "rms_norm_eps": 1e-3,
    },
    "old-theta": {"rope_theta": 1000000.0, "rope_scaling": None, "rms_norm_eps": 1e-5},
    "old-linear": {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.5}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}},
    "old-yarn": {
        "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "yarn-attention-factor": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "attention_factor": 1.3,
        }
    },
    "yarn-mscale": {
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
    },
    "yarn-not-truncated": {
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": False,
        },
    },
}


def make_checkpoint(
    folder: Path,
    config_overrides: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    shards: int = 1,
) -> Path:
    """Write a random checkpoint (config.json, safetensors) into `folder` and return it.

    With more than one shard the tensors are dealt out one by one, so that layers cross files.
    """
    config = Qwen3Config(**_BASE | copy.deepcopy(config_overrides))
    config.dtype = dtype
    config.architectures = ["Qwen3ForCausalLM"]
    model = Qwen3ForCausalLM(config)
    randomise(model, seed)
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    folder.mkdir(parents=True, exist_ok=True)
    _write_config(folder, config, config_overrides)
    write_shards(folder, tensors, shards)
    return folder


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    """Draw all parameters so that an error in the use of any shows in the logits, which spread by 3."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            gain = 3.0 if name.startswith(("lm_head", "model.embed_tokens")) else 1.5
            parameter.normal_(0.0, gain / parameter.shape[1] ** 0.5, generator=generator)
        elif name.endswith("bias"):
            parameter.normal_(0.0, 0.5, generator=generator)
        else:
            parameter.uniform_(0.5, 1.5, generator=generator)


def write_shards(folder: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    """Write model.safetensors, or numbered shards and their index."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        names = list(tensors)[shard::shards]
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    total_size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_config(folder: Path, config: Qwen3Config, overrides: dict[str, Any]) -> None:
    config.save_pretrained(folder)
    if "rope_scaling" not in overrides:
        return
    path = folder / "config.json"
    values = json.loads(path.read_text())
    del values["rope_parameters"]
    values |= {"rope_theta": overrides["rope_theta"], "rope_scaling": overrides["rope_scaling"]}
    values["torch_dtype"] = values.pop("dtype")
    path.write_text(json.dumps(values, indent=2))
