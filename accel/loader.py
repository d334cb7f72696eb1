"""From a model's name to an executor that is ready to step."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from decodestep.accel.attention.cpu import CpuAttention
from decodestep.accel.config import ModelConfig
from decodestep.accel.dtype import choose_dtype
from decodestep.accel.errors import AccelError, DeviceError, ModelError
from decodestep.accel.executor import Executor
from decodestep.accel.kv_cache import BlockAllocator, CachePlan, plan_cache
from decodestep.accel.layers.linear import Linear
from decodestep.accel.models.qwen3 import Embedding, Qwen3ForCausalLM
from decodestep.accel.sampler.sampler import Sampler
from decodestep.accel.sampler.state import SamplingState
from decodestep.accel.sequences import SequenceTable
from decodestep.accel.source import resolve_model
from decodestep.accel.weights import load_weights

_BLOCK_SIZE = 32  # positions; on a CPU small blocks cost nothing while they are consecutive
_MAX_PREFILL_TOKENS = 256  # in one piece: enough for full speed, short enough to let steps in between
_RESERVED_BLOCKS = 1  # never handed out: Executor.check() writes there


@dataclass(frozen=True, slots=True)
class Settings:
    """What can be chosen. None: by the device or the model."""

    model: str
    device: str = "cpu"
    dtype: str = "auto"
    threads: int | None = None
    kv_cache_memory: int | None = None  # bytes
    num_blocks: int | None = None
    block_size: int | None = None
    max_sequences: int = 256
    max_context: int | None = None
    max_rows: int = 64
    max_prefill_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded model and what was chosen for it."""

    folder: Path
    config: ModelConfig
    dtype: torch.dtype
    executor: Executor
    cache: CachePlan
    num_parameters: int
    weight_bytes: int
    weight_formats: dict[str, int]  # tensors in each


class LoadCancelled(AccelError):
    """Loading was told to stop."""


def load(
    settings: Settings, report: Callable[[str], None], is_cancelled: Callable[[], bool] = lambda: False
) -> Engine:
    """Load a model. `report` gets a line now and then, for people; `is_cancelled` is asked often.

    Raises ModelError, DeviceError for a device that is missing or too small, and LoadCancelled.
    """
    if settings.device != "cpu":
        raise DeviceError(f"device {settings.device}: this version serves cpu only")
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    folder = resolve_model(settings.model)
    config = ModelConfig.from_folder(folder)
    config = _limit_context(config, settings)
    dtype, reason = choose_dtype(settings.dtype, config, settings.device)
    report(f"{settings.model}: computing in {_name(dtype)}: {reason}; {torch.get_num_threads()} threads")
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config, dtype)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    load_weights(model, folder, config, dtype, _Progress(report, is_cancelled))

    block_size = settings.block_size or _BLOCK_SIZE
    plan = plan_cache(
        config,
        dtype.itemsize,
        block_size,
        max_tokens=settings.max_sequences * config.max_position_embeddings,
        num_blocks=settings.num_blocks,
        memory=settings.kv_cache_memory,
    )
    report(
        f"KV cache: {plan.num_blocks} blocks of {block_size} positions, {plan.num_tokens} tokens, "
        f"{plan.num_bytes / 2**20:.0f} MiB ({plan.reason})"
    )
    num_blocks = plan.num_blocks + _RESERVED_BLOCKS
    ends = frozenset(config.eos_token_ids)
    sampling = SamplingState(settings.max_sequences, config.vocab_size, ends, torch.device("cpu"))
    executor = Executor(
        model,
        CpuAttention(config, num_blocks, block_size, dtype),
        Sampler(sampling),
        SequenceTable(
            settings.max_sequences,
            config.max_position_embeddings,
            block_size,
            BlockAllocator(num_blocks, _RESERVED_BLOCKS),
            sampling,
            ends,
        ),
        settings.max_prefill_tokens or _MAX_PREFILL_TOKENS,
        settings.max_rows,
    )
    executor.check()
    return Engine(
        folder,
        config,
        dtype,
        executor,
        plan,
        num_parameters,
        num_parameters * dtype.itemsize,
        _formats(model),
    )


def _limit_context(config: ModelConfig, settings: Settings) -> ModelConfig:
    length = settings.max_context
    if length is None:
        return config
    if length > config.max_position_embeddings:
        raise ModelError(
            settings.model,
            [f"max_position_embeddings {config.max_position_embeddings}: below --max-context {length}"],
        )
    return dataclasses.replace(config, max_position_embeddings=length)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _formats(model: torch.nn.Module) -> dict[str, int]:
    """How many tensors are packed for their kernel and how many are as in the checkpoint."""
    formats: Counter[str] = Counter()
    for module in model.modules():
        formats["packed"] += isinstance(module, Linear | Embedding) and module.is_packed
        formats["plain"] += sum(1 for _ in module.parameters(recurse=False))
    return {name: count for name, count in formats.items() if count}


class _Progress:
    """Reports once a second, so that a small model reports nothing."""

    def __init__(self, report: Callable[[str], None], is_cancelled: Callable[[], bool]) -> None:
        self._report = report
        self._is_cancelled = is_cancelled
        self._next = time.monotonic() + 1

    def __call__(self, done: int, total: int) -> None:
        """`done` of `total` bytes are loaded. Raises LoadCancelled."""
        if self._is_cancelled():
            raise LoadCancelled("stopped while loading")
        now = time.monotonic()
        if now >= self._next:
            self._next = now + 1
            self._report(f"loading weights: {100 * done // total}% of {total / 2**20:.0f} MiB")
