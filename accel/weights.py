"""From safetensors to the model's parameters: match, fuse, convert, pack."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from decodestep.accel.checkpoint import STORED_DTYPES, StoredTensor, read_checkpoint
from decodestep.accel.config import ModelConfig
from decodestep.accel.errors import ModelError

_CHUNK_BYTES = 2**20  # read and converted at a time: both sides stay in the processor's cache
_HARMLESS = "rotary_emb.inv_freq"  # some old checkpoints hold it; it follows from the config


@runtime_checkable
class Packable(Protocol):
    """A module that brings its weights into the layout of its kernel once they are there."""

    def pack(self) -> None:
        """Replace the weights; those given are dropped."""
        ...


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a parameter, from `row` on, that are one tensor of the checkpoint."""

    name: str
    row: int
    shape: tuple[int, ...]


def load_weights(
    model: torch.nn.Module,
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    progress: Callable[[int, int], None],
) -> None:
    """Fill a model whose parameters are on the meta device from the safetensors in `folder`.

    Modules are named like the checkpoint's, except that `self_attn.qkv_proj` holds the rows of q_proj, k_proj
    and v_proj one after another, and `mlp.gate_up_proj` those of gate_proj and up_proj. Parameters become
    tensors of `dtype` on the CPU. A module with a method `pack` is packed as soon as its own parameters are
    complete, so at most one module's weights exist twice. `progress` gets bytes done and bytes in all.

    Raises ModelError naming every tensor that is missing, extra, of another shape or dtype, and every file
    that is missing or damaged, before any data is read; and when reading fails.
    """
    plan = {
        (module_name, name): list(_parts(f"{module_name}.{name}", tuple(parameter.shape), config))
        for module_name, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
    }
    parts = [part for parameter in plan.values() for part in parameter]
    tensors = _match(parts, folder, config)
    modules: dict[str, list[str]] = {}
    # In the order of the files, which is read ahead.
    for module_name, name in sorted(plan, key=lambda key: _place(tensors[plan[key][0].name])):
        modules.setdefault(module_name, []).append(name)
    done, total = 0, sum(tensor.num_bytes for tensor in tensors.values())
    progress(done, total)
    chunk = torch.empty(_CHUNK_BYTES, dtype=torch.uint8)
    for module_name, names in modules.items():
        module = model.get_submodule(module_name)
        for name in names:
            values = torch.empty(module.get_parameter(name).shape, dtype=dtype)
            for part in plan[module_name, name]:
                rows = values.narrow(0, part.row, part.shape[0])
                for num_bytes in _read(tensors[part.name], rows, chunk):
                    done += num_bytes
                    progress(done, total)
            setattr(module, name, torch.nn.Parameter(values, requires_grad=False))
        if isinstance(module, Packable):
            module.pack()


def _parts(name: str, shape: tuple[int, ...], config: ModelConfig) -> Iterator[_Part]:
    """The tensors of the checkpoint that a parameter is made of."""
    query_rows = config.num_attention_heads * config.head_dim
    kv_rows = config.num_key_value_heads * config.head_dim
    prefix, _, kind = name.rpartition(".")
    parent, _, module = prefix.rpartition(".")
    rows: dict[str, int]
    if module == "qkv_proj":
        rows = {"q_proj": query_rows, "k_proj": kv_rows, "v_proj": kv_rows}
    elif module == "gate_up_proj":
        rows = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
    else:
        yield _Part(name, 0, shape)
        return
    row = 0
    for part, count in rows.items():
        yield _Part(f"{parent}.{part}.{kind}", row, (count, *shape[1:]))
        row += count


def _match(parts: list[_Part], folder: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """The stored tensor of each part by its name. Raises ModelError."""
    checkpoint = read_checkpoint(folder)
    problems = list(checkpoint.problems)
    expected = {part.name: part.shape for part in parts}
    for name, shape in expected.items():
        tensor = checkpoint.tensors.get(name)
        if tensor is None:
            if not checkpoint.may_hold(name):
                problems.append(f"tensor {name} {list(shape)} is missing")
            continue
        if tensor.shape != shape:
            problems.append(f"tensor {name} {list(tensor.shape)}: expected the shape {list(shape)}")
        if tensor.dtype not in STORED_DTYPES:
            problems.append(f"tensor {name} {tensor.dtype}: expected the dtype {', '.join(STORED_DTYPES)}")
    for name in checkpoint.tensors:
        is_tied_head = name == "lm_head.weight" and config.tie_word_embeddings
        if name not in expected and not is_tied_head and not name.endswith(_HARMLESS):
            problems.append(f"tensor {name} is none that config.json calls for")
    if problems:
        raise ModelError(str(folder), problems)
    return {name: checkpoint.tensors[name] for name in expected}


def _place(tensor: StoredTensor) -> tuple[Path, int]:
    return tensor.path, tensor.offset


def _read(tensor: StoredTensor, out: torch.Tensor, chunk: torch.Tensor) -> Iterator[int]:
    """Read a tensor into `out`, contiguous and of its shape, and yield the bytes of each chunk.

    Each chunk is converted on the way, so that no tensor exists in both dtypes. The file is read, not mapped:
    a mapped one counts as memory of the process, and ends it with SIGBUS when it is cut short meanwhile.
    """
    stored = STORED_DTYPES[tensor.dtype]
    raw, source, target = chunk.numpy().data, chunk.view(stored), out.view(-1)
    try:
        with tensor.path.open("rb") as file:
            file.seek(tensor.offset)
            for start in range(0, tensor.num_bytes, len(chunk)):
                num_bytes = min(len(chunk), tensor.num_bytes - start)
                if file.readinto(raw[:num_bytes]) < num_bytes:
                    raise _unreadable(tensor, "it became shorter")
                first, count = start // stored.itemsize, num_bytes // stored.itemsize
                target[first : first + count].copy_(source[:count])
                yield num_bytes
    except OSError as error:
        raise _unreadable(tensor, error.strerror) from error


def _unreadable(tensor: StoredTensor, reason: str | None) -> ModelError:
    path = tensor.path
    return ModelError(str(path.parent), [f"{path.name} cannot be read ({reason}): fetch it again"])
