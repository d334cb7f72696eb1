"""Headers of safetensors: files that are missing, damaged or contradict each other."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import CONFIGS, make_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from decodestep.accel.checkpoint import read_checkpoint

TIED = "tied-mqa-3-layers"


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    """A checkpoint that a test may damage."""
    return make_checkpoint(tmp_path, CONFIGS[TIED])


def problems_of(folder: Path) -> list[str]:
    return read_checkpoint(folder).problems


@pytest.mark.parametrize("shards", [1, 3])
def test_headers_are_read_as_by_the_safetensors_library(shards: int, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, CONFIGS[TIED], dtype=torch.bfloat16, shards=shards)
    checkpoint = read_checkpoint(folder)
    expected = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                tensor = file.get_slice(name)
                expected[name] = (path, tuple(tensor.get_shape()), tensor.get_dtype())
    found = {name: (tensor.path, tensor.shape, tensor.dtype) for name, tensor in checkpoint.tensors.items()}
    assert found == expected
    assert not checkpoint.problems


def test_two_files_with_the_same_tensor(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, CONFIGS["untied"], shards=2)
    (folder / "model.safetensors.index.json").unlink()
    save_file({"model.norm.weight": torch.zeros(64)}, folder / "x.safetensors")
    (problem,) = problems_of(folder)
    assert problem.startswith("tensor model.norm.weight is in model-0000")
    assert problem.endswith("and in x.safetensors: remove one of the files")


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ("{", "Expecting property name"),
        ("[]", "it has no weight_map"),
        ('{"weight_map": {}}', "it has no weight_map"),
        ('{"weight_map": {"model.norm.weight": "../x.safetensors"}}', "weight_map names a file outside"),
    ],
)
def test_a_damaged_index(index: str, reason: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, CONFIGS["untied"], shards=2)
    (folder / "model.safetensors.index.json").write_text(index)
    (problem,) = problems_of(folder)
    assert problem.startswith(f"model.safetensors.index.json is damaged ({reason}")


@given(kept=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_refused_wherever_it_ends(
    kept: float, checkpoint_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = checkpoint_of(TIED)
    folder = tmp_path_factory.mktemp("cut")
    (folder / "config.json").write_bytes((whole / "config.json").read_bytes())
    data = (whole / "model.safetensors").read_bytes()
    size = math.floor(kept * len(data))
    (folder / "model.safetensors").write_bytes(data[:size])
    (problem,) = problems_of(folder)
    assert problem.startswith(f"model.safetensors is damaged (truncated: {size} bytes, ")


def write_header(path: Path, header: object) -> None:
    data = json.dumps(header).encode()
    path.write_bytes(len(data).to_bytes(8, "little") + data + bytes(64))


NORM = {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ([], "its header is no JSON object"),
        ({"x": {"dtype": "F32"}}, "its header gives tensor x no sound dtype, shape and data_offsets"),
        ({"x": NORM | {"shape": [16, -1]}}, "tensor x takes 64 bytes, which is not F32 [16, -1]"),
        ({"x": NORM | {"shape": [17]}}, "tensor x takes 64 bytes, which is not F32 [17]"),
        ({"x": NORM, "y": NORM}, "tensor y begins at byte"),
        ({"x": NORM | {"data_offsets": [64, 0]}}, "its header gives tensor x no sound"),
        ({"x": NORM | {"shape": [8], "data_offsets": [0, 32]}}, "too long:"),
    ],
    ids=json.dumps,
)
def test_a_header_that_contradicts_itself(header: object, reason: str, tied: Path) -> None:
    write_header(tied / "model.safetensors", header)
    (problem,) = problems_of(tied)
    assert problem.startswith(f"model.safetensors is damaged ({reason}")


def test_a_file_that_is_no_safetensors(tied: Path) -> None:
    (tied / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    (problem,) = problems_of(tied)
    assert problem.startswith("model.safetensors is damaged (truncated: 43 bytes")
