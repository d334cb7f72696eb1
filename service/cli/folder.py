"""Says what a model folder holds and would need, without loading its weights."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from decodestep.accel.config import ModelConfig
from decodestep.accel.errors import ModelError
from decodestep.accel.source import resolve_model
from decodestep.service.cli.failures import explain_failure
from decodestep.service.cli.report import show

_KV_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def info_of_model(model: str, as_json: bool) -> int:
    """Print what a model folder holds. Returns the exit code: 1 if it would be refused."""
    try:
        report = _inspect(model)
    except ModelError as error:
        print(explain_failure(error), file=sys.stderr)
        return 1
    show(model, report, as_json)
    return 1 if report["problems"] else 0


def _inspect(model: str) -> dict[str, Any]:
    """Report on `model` (a folder, a hub id or demo); its `problems` are why it would be refused.

    Raises ModelError if there is no such model.
    """
    folder = resolve_model(model)
    problems: list[str] = []
    report: dict[str, Any] = {"folder": str(folder)}
    report["has_tokenizer"] = any((folder / name).exists() for name in ("tokenizer.json", "vocab.json"))
    report["problems"] = problems
    try:
        config = ModelConfig.from_folder(folder)
    except ModelError as error:
        problems += error.problems
    else:
        values = asdict(config)
        report["rope"] = {key: value for key, value in values.pop("rope").items() if value is not None}
        report["config"] = values
        per_position = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        report["kv_bytes_per_token"] = {dtype: per_position * size for dtype, size in _KV_ITEM_BYTES.items()}
        report["kv_bytes_per_context"] = {
            dtype: size * config.max_position_embeddings
            for dtype, size in report["kv_bytes_per_token"].items()
        }
    report["weights"] = _weights(folder, problems)
    return report


def _weights(folder: Path, problems: list[str]) -> dict[str, Any]:
    """Numbers of files, tensors and parameters, and bytes by dtype, from the headers of the safetensors."""
    tensors = parameters = 0
    size_by_dtype: Counter[str] = Counter()
    paths = _weight_files(folder, problems)
    for path in paths:
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118  (not a mapping)
                    tensor = file.get_slice(name)
                    count = math.prod(tensor.get_shape())
                    tensors += 1
                    parameters += count
                    size_by_dtype[tensor.get_dtype()] += count * _bits(tensor.get_dtype()) // 8
        except (OSError, SafetensorError) as error:
            problems.append(f"{path.name}: {error}")
    return {
        "num_files": len(paths),
        "num_tensors": tensors,
        "num_parameters": parameters,
        "bytes": sum(size_by_dtype.values()),
        "bytes_by_dtype": dict(size_by_dtype),
    }


def _weight_files(folder: Path, problems: list[str]) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [folder / "model.safetensors"]
    try:
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        problems.append(f"{index.name}: not an index of safetensors ({error})")
        return []


def _bits(dtype: str) -> int:
    """Bits of a safetensors dtype such as BF16, F8_E4M3 or BOOL."""
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8
