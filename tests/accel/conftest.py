"""What the tests of accel share."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import CONFIGS, make_checkpoint

__all__ = ["CONFIGS", "make_checkpoint"]


@pytest.fixture(name="make_checkpoint", scope="session")
def _make_checkpoint() -> Callable[..., Path]:
    """The function checkpoints.make_checkpoint."""
    return make_checkpoint


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of the float32 checkpoint of a name in CONFIGS, written once. Not to be changed by a test."""
    folders: dict[str, Path] = {}

    def folder_of(name: str) -> Path:
        if name not in folders:
            folder = tmp_path_factory.mktemp(name)
            folders[name] = make_checkpoint(folder, CONFIGS[name], dtype=torch.float32)
        return folders[name]

    return folder_of
