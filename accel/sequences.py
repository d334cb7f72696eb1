"""Sequence state: rows of persistent tensors, indexed by slot, and their host side."""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt
import torch

from decodestep.accel.errors import RowError
from decodestep.accel.kv_cache import BlockAllocator, blocks_for
from decodestep.accel.sampler.params import SamplingParams
from decodestep.accel.sampler.state import SamplingState


class FinishReason(enum.Enum):
    """Why a sequence is finished."""

    END_TOKEN = "END_TOKEN"
    STOP = "STOP"
    LENGTH = "LENGTH"
    CONTEXT = "CONTEXT"


class Sequence:
    """Host side of one sequence. `length` positions have KV and history; a pending token is beyond them."""

    __slots__ = (
        "blocks",
        "finish",
        "is_broken",
        "length",
        "params",
        "pending",
        "prompt_length",
        "seed_told",
        "slot",
    )

    def __init__(self, slot: int, params: SamplingParams) -> None:
        self.slot = slot
        self.params = params
        self.length = 0
        self.prompt_length = 0  # leading positions that were given; those after them were generated
        self.pending: int | None = None  # sampled and not fed
        self.finish: FinishReason | None = None
        self.is_broken = False  # its last row failed: what the caller sent ahead must not run
        self.seed_told = False  # whether an answer has named the seed
        self.blocks: list[int] = []


class SequenceTable:
    """All living sequences. Only the thread that owns the device may change it."""

    def __init__(
        self,
        num_slots: int,
        context_length: int,
        block_size: int,
        allocator: BlockAllocator,
        sampling: SamplingState,
        end_token_ids: frozenset[int],
    ) -> None:
        self.end_token_ids = end_token_ids
        self.context_length = context_length
        self.block_size = block_size
        self.allocator = allocator
        self.sampling = sampling
        self.num_slots = num_slots
        # Tokens fed so far; undefined beyond a sequence's length. [slots, context]
        self.history = torch.zeros(num_slots, context_length, dtype=torch.int32)
        # Block ids by position // block_size. [slots, blocks of a full sequence]
        self.block_tables = torch.zeros(num_slots, blocks_for(context_length, block_size), dtype=torch.int32)
        # The same memory, for writes that cost no dispatch.
        self.history_np: npt.NDArray[np.int32] = self.history.numpy()
        self.block_tables_np: npt.NDArray[np.int32] = self.block_tables.numpy()
        self._free_slots = list(range(num_slots - 1, -1, -1))

    @property
    def num_sequences(self) -> int:
        """Sequences that live now."""
        return self.num_slots - len(self._free_slots)

    def open(self, params: SamplingParams) -> Sequence:
        """Start an empty sequence. Raises RowError NO_FREE_SEQUENCES."""
        if not self._free_slots:
            raise RowError(
                "NO_FREE_SEQUENCES",
                f"{self.num_slots} sequences live, the most that can: release one and send the row again",
                {"max_sequences": str(self.num_slots)},
            )
        sequence = Sequence(self._free_slots.pop(), params)
        self.sampling.set(sequence.slot, params)
        return sequence

    def close(self, sequence: Sequence) -> int:
        """End a sequence and return how many blocks became free."""
        freed = len(sequence.blocks)
        self.allocator.release(sequence.blocks)
        sequence.blocks = []
        self._free_slots.append(sequence.slot)
        return freed

    def set_params(self, sequence: Sequence, params: SamplingParams) -> None:
        """Replace how the sequence samples."""
        sequence.params = params
        sequence.seed_told = False
        self.sampling.set(sequence.slot, params)

    def reserve(self, sequence: Sequence, length: int) -> None:
        """Hold blocks for `length` positions. Raises RowError NO_FREE_BLOCKS, changing nothing."""
        held = len(sequence.blocks)
        missing = blocks_for(length, self.block_size) - held
        if missing > 0:
            new = self.allocator.allocate(missing, after=sequence.blocks[-1] if held else None)
            self.block_tables_np[sequence.slot, held : held + missing] = new
            sequence.blocks.extend(new)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Forget positions from `length` on and free the blocks that only they used."""
        sequence.length = length
        sequence.prompt_length = min(sequence.prompt_length, length)
        keep = blocks_for(length, self.block_size)
        self.allocator.release(sequence.blocks[keep:])
        del sequence.blocks[keep:]

    def accept(self, sequence: Sequence, token_id: int) -> None:
        """Take a sampled token as the pending one and decide whether it finishes the sequence."""
        sequence.pending = token_id
        params = sequence.params
        if token_id in self.end_token_ids and not params.ignore_eos:
            sequence.finish = FinishReason.END_TOKEN
        elif token_id in params.stop_token_ids:
            sequence.finish = FinishReason.STOP
        elif params.max_tokens is not None and self.num_output_tokens(sequence) >= params.max_tokens:
            sequence.finish = FinishReason.LENGTH
        elif sequence.length >= self.context_length:
            sequence.finish = FinishReason.CONTEXT
        else:
            sequence.finish = None

    @staticmethod
    def num_output_tokens(sequence: Sequence) -> int:
        """Generated tokens, the pending one included."""
        return sequence.length - sequence.prompt_length + (sequence.pending is not None)
