"""The safetensors of a model folder: which files, and what their headers say. Reads no tensor data."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

# What weights may be stored as. Other dtypes belong to quantised checkpoints.
STORED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a safetensors file: row-major, little-endian."""

    path: Path
    offset: int  # of its first byte in the file
    num_bytes: int
    shape: tuple[int, ...]
    dtype: str  # as the header names it: F32, BF16, F8_E4M3, ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All tensors of a folder, and what is wrong with its files."""

    tensors: Mapping[str, StoredTensor]
    problems: list[str]
    weight_map: Mapping[str, str]  # file of each tensor by the index; empty where there is none
    unread: frozenset[str]  # names of files that are missing or damaged

    def may_hold(self, name: str) -> bool:
        """Whether a tensor that was not found may be in a file that could not be read."""
        return self.weight_map.get(name) in self.unread if self.weight_map else bool(self.unread)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read the headers of model.safetensors, or of the index's shards, or else of every *.safetensors."""
    problems: list[str] = []
    unread: set[str] = set()
    weight_map: dict[str, str] = {}
    names = [_SINGLE]
    if not (folder / _SINGLE).exists():
        if (folder / _INDEX).exists():
            try:
                weight_map = _read_index(folder / _INDEX)
            except (OSError, ValueError) as error:
                unread.add(_INDEX)
                problems.append(_explain(_INDEX, error, 0))
            names = sorted(set(weight_map.values()))
        else:
            names = sorted(path.name for path in folder.glob("*.safetensors"))
            if not names:
                unread.add(_SINGLE)
                problems.append(
                    f"{_SINGLE} is missing, as is any other *.safetensors: fetch the model again, or convert "
                    "weights of another format with transformers' save_pretrained"
                )
    tensors: dict[str, StoredTensor] = {}
    for file_name in names:
        try:
            found = _read_header(folder / file_name)
        except (OSError, ValueError) as error:
            unread.add(file_name)
            problems.append(
                _explain(file_name, error, sum(file == file_name for file in weight_map.values()))
            )
            continue
        for name, tensor in found.items():
            if weight_map.get(name, file_name) != file_name:
                continue  # a leftover: the index says that another file holds it
            if name in tensors:
                other = tensors[name].path.name
                problems.append(f"tensor {name} is in {other} and in {file_name}: remove one of the files")
            tensors[name] = tensor
    return Checkpoint(tensors, problems, weight_map, frozenset(unread))


def _explain(file_name: str, error: OSError | ValueError, num_tensors: int) -> str:
    held = f" (it holds {num_tensors} tensors)" if num_tensors else ""
    if isinstance(error, FileNotFoundError):
        return f"{file_name} is missing{held}: fetch the model again"
    if isinstance(error, OSError):
        return f"{file_name} cannot be read ({error.strerror}){held}: check that it is a readable file"
    return f"{file_name} is damaged ({error}){held}: fetch it again"


def _read_index(path: Path) -> dict[str, str]:
    """File of each tensor. Raises OSError, and ValueError saying what is wrong with the index."""
    match json.loads(path.read_text(encoding="utf-8")):
        case {"weight_map": dict(weight_map)} if weight_map:
            files = set(map(str, weight_map.values()))
            if all(Path(file).name == file for file in files):
                return {name: str(file) for name, file in weight_map.items()}
            raise ValueError("weight_map names a file outside the folder")
        case _:
            raise ValueError("it has no weight_map")


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Tensors of one file. Raises OSError, and ValueError saying how the file is damaged.

    Format (https://huggingface.co/docs/safetensors): the header's length in 8 bytes, little-endian; the
    header as JSON; the data, which the tensors cover without holes.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 + length:
            raise ValueError(f"truncated: {size} bytes, its header alone takes {8 + length}")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")  # noqa: TRY004  (a value of the file)
    header.pop("__metadata__", None)
    tensors = {name: _parse_entry(path, 8 + length, name, entry) for name, entry in header.items()}
    end = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if tensor.offset != end:
            raise ValueError(f"tensor {name} begins at byte {tensor.offset}, not {end}")
        end += tensor.num_bytes
    if size != end:
        raise ValueError(f"{'truncated' if size < end else 'too long'}: {size} bytes, its header says {end}")
    return tensors


def _parse_entry(path: Path, data_start: int, name: str, entry: object) -> StoredTensor:
    match entry:
        case {"dtype": str(dtype), "shape": [*dims], "data_offsets": [int(begin), int(end)]} if begin <= end:
            shape = tuple(dim for dim in dims if type(dim) is int and dim >= 0)
        case _:
            raise ValueError(f"its header gives tensor {name} no sound dtype, shape and data_offsets")
    stored = STORED_DTYPES.get(dtype)
    if len(shape) < len(dims) or (stored and end - begin != math.prod(shape) * stored.itemsize):
        raise ValueError(f"tensor {name} takes {end - begin} bytes, which is not {dtype} {dims}")
    return StoredTensor(path, data_start + begin, end - begin, shape, dtype)
