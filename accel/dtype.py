"""Which dtype to compute in."""

from __future__ import annotations

import torch

from decodestep.accel.config import CHECKPOINT_DTYPES, ModelConfig
from decodestep.accel.errors import DeviceError

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in CHECKPOINT_DTYPES}
_BF16_UNITS = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512"}


def choose_dtype(requested: str, config: ModelConfig, device_type: str) -> tuple[torch.dtype, str]:
    """The compute dtype and, for people, why: `requested`, or for `auto` the fastest that is right.

    A CPU without bfloat16 units takes 5 to 6 times as long for a prefill in bfloat16 as in float32.

    Raises DeviceError for a dtype that is none of auto, float32, bfloat16 and float16.
    """
    if requested != "auto":
        if requested not in _DTYPES:
            raise DeviceError(f"dtype {requested}: expected one of auto, {', '.join(_DTYPES)}")
        return _DTYPES[requested], "as stated"
    if device_type != "cpu":
        if config.dtype == "float16":
            return torch.float16, "the checkpoint is float16"
        return torch.bfloat16, f"what {device_type} computes fastest; the checkpoint is {config.dtype}"
    if config.dtype == "float32":
        return torch.float32, "the checkpoint is float32"
    found = [unit for capability, unit in _BF16_UNITS.items() if torch.cpu.get_capabilities().get(capability)]
    if found:
        return torch.bfloat16, f"the processor has {' and '.join(found)} units for bfloat16"
    return torch.float32, f"the processor has no units for bfloat16; the checkpoint is {config.dtype}"
