"""KV blocks: how many there are and who holds them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from decodestep.accel.config import ModelConfig
from decodestep.accel.errors import DeviceError, RowError


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that `tokens` positions take."""
    return -(-tokens // block_size)


class BlockAllocator:
    """Hands out block ids from [reserved, num_blocks), in consecutive runs where it can.

    Attention on a CPU reads a run of consecutive blocks without copying them. A new sequence therefore starts
    in the middle of the largest free run: the sequence before the run and the new one both have room to grow.
    """

    def __init__(self, num_blocks: int, reserved: int = 0) -> None:
        self._is_free = np.ones(num_blocks + 1, dtype=bool)  # the last is a sentinel: never free
        self._is_free[:reserved] = False
        self._is_free[num_blocks] = False
        self.num_free = num_blocks - reserved
        self.capacity = self.num_free

    def allocate(self, count: int, after: int | None) -> list[int]:
        """Take `count` blocks, following block `after` (a sequence's last one) if they are free.

        Raises RowError NO_FREE_BLOCKS, taking none.
        """
        if count > self.num_free:
            raise RowError(
                "NO_FREE_BLOCKS",
                f"{count} KV blocks needed, {self.num_free} free: release sequences and send the row again",
                {"needed_blocks": str(count), "free_blocks": str(self.num_free)},
            )
        taken: list[int] = []
        if after is not None:
            self._take_run(after + 1, count, taken)
        while len(taken) < count:
            start, length = self._largest_run()
            want = count - len(taken)
            if start > 0 and length >= 2 * want:
                start += (length - want) // 2
            self._take_run(start, want, taken)
        self.num_free -= count
        return taken

    def release(self, blocks: list[int]) -> None:
        """Give blocks back."""
        self._is_free[blocks] = True
        self.num_free += len(blocks)

    def _take_run(self, start: int, want: int, taken: list[int]) -> None:
        stop = start
        while stop - start < want and self._is_free[stop]:
            stop += 1
        self._is_free[start:stop] = False
        taken.extend(range(start, stop))

    def _largest_run(self) -> tuple[int, int]:
        edges = np.flatnonzero(np.diff(self._is_free, prepend=False))
        starts, stops = edges[::2], edges[1::2]
        largest = int(np.argmax(stops - starts))
        return int(starts[largest]), int(stops[largest] - starts[largest])


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Size of the paged KV cache and, for people, why."""

    num_blocks: int  # that sequences can hold
    block_size: int  # positions
    block_bytes: int
    reason: str

    @property
    def num_tokens(self) -> int:
        """Positions that all blocks hold."""
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        """Memory of all blocks."""
        return self.num_blocks * self.block_bytes


def plan_cache(
    config: ModelConfig,
    itemsize: int,
    block_size: int,
    max_tokens: int,
    num_blocks: int | None = None,
    memory: int | None = None,
) -> CachePlan:
    """Size the cache: `num_blocks` as stated, else what fits into `memory` bytes, else half of what is free.

    `max_tokens` is what all sequences at their longest can hold; without a stated size no more is taken.
    `itemsize` is that of the cache's dtype. Raises DeviceError if not even one block fits.
    """
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * itemsize
    block_bytes = per_token * block_size
    free = available_memory()
    if num_blocks is not None:
        reason = "as --num-blocks says"
    elif memory is not None:
        num_blocks = memory // block_bytes
        reason = "as --kv-cache-memory says"
    else:
        num_blocks = free // 2 // block_bytes
        reason = f"half of the {free / 2**30:.1f} GiB that are free"
        if num_blocks > blocks_for(max_tokens, block_size):
            num_blocks = blocks_for(max_tokens, block_size)
            reason = "all sequences at full length"
    if num_blocks < 1:
        raise DeviceError(
            f"no memory for the KV cache: one block of {block_size} positions takes {block_bytes} bytes, "
            f"{free} bytes are free: free memory, or state --kv-cache-memory or --num-blocks"
        )
    if num_blocks * block_bytes > free:
        raise DeviceError(
            f"{num_blocks} KV blocks take {num_blocks * block_bytes / 2**30:.2f} GiB, "
            f"{free / 2**30:.2f} GiB are free: state a smaller --kv-cache-memory or --num-blocks"
        )
    return CachePlan(num_blocks, block_size, block_bytes, reason)


def available_memory() -> int:
    """Bytes that this process can still take: the system's, and every cgroup limit above the process."""
    free = psutil.virtual_memory().available
    for folder in _cgroup_folders():
        limit = _read_number(folder / "memory.max", folder / "memory.limit_in_bytes")
        used = _read_number(folder / "memory.current", folder / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            free = min(free, max(0, limit - used + _reclaimable(folder / "memory.stat")))
    return int(free)


def _cgroup_folders() -> list[Path]:
    """Memory cgroups of this process, versions 1 and 2, from its own up to the root."""
    folders: list[Path] = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return folders
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = Path("/sys/fs/cgroup")
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
        else:
            continue
        folder = Path(os.path.normpath(f"{root}/{path}"))
        while folder.is_relative_to(root):
            folders.append(folder)
            folder = folder.parent
    return folders


def _read_number(*paths: Path) -> int | None:
    for path in paths:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else None
    return None


def _reclaimable(stat: Path) -> int:
    """Bytes of file pages that the kernel gives up under pressure."""
    try:
        fields = dict(line.split() for line in stat.read_text().splitlines())
    except OSError:
        return 0
    return int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))
