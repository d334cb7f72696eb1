"""The compute dtype: as stated, or what is fastest and right on the device."""

import dataclasses
from pathlib import Path

import pytest
import torch

from decodestep.accel.config import ModelConfig
from decodestep.accel.dtype import choose_dtype
from decodestep.accel.errors import DeviceError
from decodestep.accel.source import DEMO_FOLDER

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def config_of(dtype: str) -> ModelConfig:
    return dataclasses.replace(ModelConfig.from_folder(DEMO_FOLDER), dtype=dtype)


@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("checkpoint", DTYPES)
@pytest.mark.parametrize("requested", DTYPES)
def test_a_stated_dtype_is_taken(requested: str, checkpoint: str, device: str) -> None:
    assert choose_dtype(requested, config_of(checkpoint), device) == (DTYPES[requested], "as stated")


@pytest.mark.parametrize("checkpoint", DTYPES)
def test_auto_asks_this_processor(checkpoint: str) -> None:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        pytest.skip("needs Linux's list of the processor's features")
    has_units = not {"avx512_bf16", "amx_bf16"}.isdisjoint(cpuinfo.read_text().split())
    dtype, reason = choose_dtype("auto", config_of(checkpoint), "cpu")
    assert dtype == (torch.bfloat16 if has_units and checkpoint != "float32" else torch.float32)
    assert ("float32" if checkpoint == "float32" else "the processor has") in reason


@pytest.mark.parametrize(
    ("capabilities", "expected", "reason"),
    [
        (
            {"avx2": True},
            torch.float32,
            "the processor has no units for bfloat16; the checkpoint is bfloat16",
        ),
        (
            {"avx512_bf16": False, "amx_bf16": False},
            torch.float32,
            "the processor has no units",
        ),
        ({"avx512_bf16": True}, torch.bfloat16, "the processor has AVX-512 units for bfloat16"),
        ({"amx_bf16": True}, torch.bfloat16, "the processor has AMX units for bfloat16"),
        (
            {"avx512_bf16": True, "amx_bf16": True},
            torch.bfloat16,
            "the processor has AMX and AVX-512 units for bfloat16",
        ),
    ],
)
def test_auto_is_bfloat16_only_with_units_for_it(
    capabilities: dict[str, bool], expected: torch.dtype, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    dtype, why = choose_dtype("auto", config_of("bfloat16"), "cpu")
    assert dtype == expected
    assert why.startswith(reason)


@pytest.mark.parametrize("checkpoint", DTYPES)
def test_auto_on_an_npu_is_half_precision(checkpoint: str) -> None:
    dtype, reason = choose_dtype("auto", config_of(checkpoint), "npu")
    assert dtype == (torch.float16 if checkpoint == "float16" else torch.bfloat16)
    assert f"the checkpoint is {checkpoint}" in reason


def test_another_name_is_refused() -> None:
    with pytest.raises(DeviceError, match="dtype int8: expected one of auto, float32, bfloat16, float16"):
        choose_dtype("int8", config_of("bfloat16"), "cpu")
