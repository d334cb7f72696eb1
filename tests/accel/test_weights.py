"""Loading weights: what arrives in the parameters, and every fault of a checkpoint by name."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import CONFIGS, make_checkpoint, write_shards
from safetensors.torch import load_file, save_file
from torch import nn

from decodestep.accel.config import ModelConfig
from decodestep.accel.errors import ModelError
from decodestep.accel.weights import load_weights

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TIED = "tied-mqa-3-layers"
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def skeleton(config: ModelConfig) -> nn.Module:
    """Modules named like the checkpoint's, with q/k/v and gate/up fused, on the meta device."""
    hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    bias = config.attention_bias

    def tree(**children: nn.Module) -> nn.Module:
        module = nn.Module()
        for name, child in children.items():
            module.add_module(name, child)
        return module

    def layer() -> nn.Module:
        return tree(
            input_layernorm=nn.RMSNorm(hidden),
            post_attention_layernorm=nn.RMSNorm(hidden),
            self_attn=tree(
                qkv_proj=nn.Linear(hidden, (heads + 2 * kv_heads) * config.head_dim, bias),
                o_proj=nn.Linear(heads * config.head_dim, hidden, bias),
                q_norm=nn.RMSNorm(config.head_dim),
                k_norm=nn.RMSNorm(config.head_dim),
            ),
            mlp=tree(
                gate_up_proj=nn.Linear(hidden, 2 * config.intermediate_size, False),
                down_proj=nn.Linear(config.intermediate_size, hidden, False),
            ),
        )

    with torch.device("meta"):
        model = tree(
            model=tree(
                embed_tokens=nn.Embedding(config.vocab_size, hidden),
                layers=nn.ModuleList(layer() for _ in range(config.num_hidden_layers)),
                norm=nn.RMSNorm(hidden),
            )
        )
        if not config.tie_word_embeddings:
            model.add_module("lm_head", nn.Linear(hidden, config.vocab_size, False))
    return model


def load(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> nn.Module:
    config = ModelConfig.from_folder(folder)
    model = skeleton(config)
    load_weights(model, folder, config, dtype, progress)
    return model


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder as the safetensors library reads them."""
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def problems_of(folder: Path) -> list[str]:
    """What loading refuses, having touched no parameter and reported no progress."""
    config = ModelConfig.from_folder(folder)
    model = skeleton(config)
    calls: list[int] = []
    with pytest.raises(ModelError) as caught:
        load_weights(model, folder, config, torch.float32, lambda done, total: calls.append(done))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not calls
    assert caught.value.source == str(folder)
    return caught.value.problems


def assert_holds(model: nn.Module, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Every parameter is the tensors of its name, fused by rows and converted; no tensor is left over."""
    left = dict(tensors)
    for name, parameter in model.named_parameters():
        for fused, parts in {
            "qkv_proj": ["q_proj", "k_proj", "v_proj"],
            "gate_up_proj": ["gate_proj", "up_proj"],
        }.items():
            if fused in name:
                expected = torch.cat([left.pop(name.replace(fused, part)) for part in parts])
                break
        else:
            expected = left.pop(name)
        assert parameter.dtype == dtype
        assert parameter.is_contiguous()
        assert not parameter.requires_grad
        assert torch.equal(parameter, expected.to(dtype)), name
    assert not left


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    """A checkpoint that a test may damage."""
    return make_checkpoint(tmp_path, CONFIGS[TIED])


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_is_fused_by_rows(name: str, checkpoint_of: Callable[[str], Path]) -> None:
    folder = checkpoint_of(name)
    assert_holds(load(folder), stored(folder), torch.float32)


@pytest.mark.parametrize("checkpoint_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_converts_any_dtype_into_any(
    checkpoint_dtype: torch.dtype, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, CONFIGS["bias-mha"], dtype=checkpoint_dtype)
    assert_holds(load(folder, dtype), stored(folder), dtype)


def test_tensors_of_one_checkpoint_may_differ_in_dtype(tied: Path) -> None:
    tensors = stored(tied)
    mixed = {name: tensor.to(DTYPES[place % 3]) for place, (name, tensor) in enumerate(tensors.items())}
    write_shards(tied, mixed, 1)
    assert_holds(load(tied), mixed, torch.float32)


def test_a_tensor_larger_than_a_read_is_whole(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, CONFIGS["untied"] | {"vocab_size": 12345}, dtype=torch.bfloat16)
    assert stored(folder)["lm_head.weight"].nbytes > 2**20
    assert_holds(load(folder), stored(folder), torch.float32)


@pytest.mark.parametrize("shards", [2, 5])
def test_shards_hold_parts_of_one_parameter(shards: int, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, CONFIGS["bias-mha"], shards=shards)
    assert_holds(load(folder), stored(folder), torch.float32)


def test_shards_without_an_index(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, CONFIGS["untied"], shards=3)
    (folder / "model.safetensors.index.json").unlink()
    assert_holds(load(folder), stored(folder), torch.float32)


def test_the_index_says_which_of_two_files_counts(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, CONFIGS["untied"], shards=2)
    expected = stored(folder)
    first, second = sorted(folder.glob("*.safetensors"))
    leftover = {name: tensor + 1 for name, tensor in load_file(first).items()}
    save_file(load_file(second) | leftover, second)
    assert_holds(load(folder), expected, torch.float32)


def test_harmless_extras_are_left_out(tied: Path) -> None:
    tensors = stored(tied)
    extras = {
        "lm_head.weight": torch.zeros(3),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8, dtype=torch.float64),
        "model.rotary_emb.inv_freq": torch.ones(8),
    }
    write_shards(tied, tensors | extras, 1)
    assert_holds(load(tied), tensors, torch.float32)


def test_progress_rises_to_the_bytes_of_all_tensors(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, CONFIGS["untied"], dtype=torch.bfloat16, shards=2)
    calls: list[tuple[int, int]] = []
    load(folder, progress=lambda done, total: calls.append((done, total)))
    total = sum(tensor.nbytes for tensor in stored(folder).values())
    done = [call[0] for call in calls]
    assert {call[1] for call in calls} == {total}
    assert (done[0], done[-1]) == (0, total)
    assert done == sorted(done)


def test_a_module_is_packed_when_it_is_complete_and_before_the_next_is_read(tmp_path: Path) -> None:
    """Packing drops the weight, as a kernel's own layout does: two unpacked ones must never exist at once."""
    unpacked: list[int] = []

    class Packing(nn.Linear):
        packed: torch.Tensor

        def pack(self) -> None:
            unpacked.append(sum(not layer.weight.is_meta for layer in layers))
            assert self.bias is None or not self.bias.is_meta
            self.packed = self.weight.detach().T.contiguous()
            self.weight = nn.Parameter(torch.empty_like(self.weight, device="meta"))

    folder = make_checkpoint(tmp_path, CONFIGS["bias-mha"], shards=2)
    config = ModelConfig.from_folder(folder)
    model = skeleton(config)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                with torch.device("meta"):
                    setattr(
                        module, name, Packing(child.in_features, child.out_features, child.bias is not None)
                    )
    layers = [module for module in model.modules() if isinstance(module, Packing)]
    load_weights(model, folder, config, torch.float32, lambda done, total: None)
    assert unpacked == [1] * len(layers)
    tensors = stored(folder)
    assert torch.equal(model.get_submodule("lm_head").packed, tensors["lm_head.weight"].T)
    assert torch.equal(
        model.get_submodule("model.layers.1.mlp.down_proj").packed,
        tensors["model.layers.1.mlp.down_proj.weight"].T,
    )


def test_all_faults_of_tensors_are_named_at_once(tied: Path) -> None:
    tensors = stored(tied)
    del tensors["model.norm.weight"]
    del tensors["model.layers.1.self_attn.v_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(64, 60)
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(96, 64, dtype=torch.int8)
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(64, 96).to(torch.float8_e4m3fn)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    tensors["model.layers.3.input_layernorm.weight"] = torch.zeros(64)
    write_shards(tied, tensors, 1)
    assert sorted(problems_of(tied)) == [
        "tensor model.layers.0.mlp.down_proj.weight F8_E4M3: expected the dtype F32, BF16, F16",
        "tensor model.layers.0.mlp.up_proj.weight I8: expected the dtype F32, BF16, F16",
        "tensor model.layers.0.self_attn.q_proj.bias is none that config.json calls for",
        "tensor model.layers.0.self_attn.q_proj.weight [64, 60]: expected the shape [64, 64]",
        "tensor model.layers.1.self_attn.v_proj.weight [16, 64] is missing",
        "tensor model.layers.3.input_layernorm.weight is none that config.json calls for",
        "tensor model.norm.weight [64] is missing",
    ]


def test_an_untied_model_needs_its_head(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, CONFIGS["untied"])
    tensors = stored(folder)
    del tensors["lm_head.weight"]
    write_shards(folder, tensors, 1)
    assert problems_of(folder) == ["tensor lm_head.weight [160, 64] is missing"]


def test_a_missing_shard_is_named_once_and_the_rest_is_still_checked(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, CONFIGS["untied"], shards=3)
    held = len(load_file(folder / "model-00002-of-00003.safetensors"))
    (folder / "model-00002-of-00003.safetensors").unlink()
    third = load_file(folder / "model-00003-of-00003.safetensors")
    lost = min(third)
    shape = list(third.pop(lost).shape)
    save_file(third, folder / "model-00003-of-00003.safetensors")
    assert problems_of(folder) == [
        f"model-00002-of-00003.safetensors is missing (it holds {held} tensors): fetch the model again",
        f"tensor {lost} {shape} is missing",
    ]


def test_a_folder_without_safetensors(tied: Path) -> None:
    (tied / "model.safetensors").rename(tied / "pytorch_model.bin")
    (problem,) = problems_of(tied)
    assert problem.startswith("model.safetensors is missing, as is any other *.safetensors:")


def test_tensors_of_a_damaged_file_are_not_named_missing_as_well(tied: Path) -> None:
    os.truncate(tied / "model.safetensors", 5000)
    (problem,) = problems_of(tied)
    assert problem.startswith("model.safetensors is damaged (truncated: 5000 bytes")


def test_a_file_that_is_cut_short_while_it_is_read(tied: Path) -> None:
    """A mapped file would end the process here."""

    def cut(done: int, total: int) -> None:
        os.truncate(tied / "model.safetensors", 5000)

    with pytest.raises(ModelError, match=r"model.safetensors cannot be read \(it became shorter\)"):
        load(tied, progress=cut)
