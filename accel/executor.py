"""Runs prefill and decode steps: rows in, tokens out. One thread owns it and the device."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from decodestep.accel.attention.base import AttentionBackend, AttentionMetadata
from decodestep.accel.errors import RowError
from decodestep.accel.forward_context import ForwardContext
from decodestep.accel.kv_cache import blocks_for
from decodestep.accel.models.qwen3 import Qwen3ForCausalLM
from decodestep.accel.sampler.sampler import RowStatus, SampledRows, Sampler, SampleRows, prompt_logprobs
from decodestep.accel.sequences import Sequence, SequenceTable

TokenIds = npt.NDArray[np.int32]
Bitmask = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities at one place: of the token there, and of the most probable ones."""

    token_id: int
    logprob: float | None
    top: list[tuple[int, float]]


@dataclass(slots=True, eq=False)
class Task:
    """One row under way: tokens to feed to a sequence that already holds the blocks for them.

    After each executor call `done` says whether all tokens are fed; then the results are there, or `error`.
    """

    sequence: Sequence
    token_ids: TokenIds
    samples: bool = True  # draw a token after the last one
    bitmask: Bitmask | None = None  # allowed tokens, packed words of 32, for this draw
    return_logits: bool = False
    prompt_logprobs: int | None = None  # logprobs of token_ids with this many alternatives

    fed: int = 0
    start_length: int = 0
    done: bool = False
    error: RowError | None = None
    sampled: TokenLogprobs | None = None
    logits: npt.NDArray[np.float32] | None = None
    prompt: list[TokenLogprobs] = field(default_factory=list)
    carry: torch.Tensor | None = None  # hidden state [hidden] of the position before the next token

    def __post_init__(self) -> None:
        self.start_length = self.sequence.length


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Where one device step's time went, in seconds, and what it held."""

    rows: int
    tokens: int
    prepare: float
    device: float
    sample: float


class Executor:
    """Owns the model, its KV cache and the sequence table."""

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        attention: AttentionBackend,
        sampler: Sampler,
        table: SequenceTable,
        max_prefill_tokens: int,
        max_rows: int,
    ) -> None:
        self.model = model
        self.attention = attention
        self.sampler = sampler
        self.table = table
        self.max_prefill_tokens = max_prefill_tokens
        self.max_rows = max_rows
        self._context = ForwardContext(attention)
        # Hidden state of each sequence's last position, for the first prompt logprob of an append, and the
        # length it belongs to: another one after a truncation whose draw failed.
        self._last_hidden = torch.zeros(table.num_slots, model.config.hidden_size, dtype=model.dtype)
        self._last_length = np.zeros(table.num_slots, dtype=np.int64)
        size = max(max_prefill_tokens, max_rows)
        self._input_ids = torch.zeros(size, dtype=torch.int64)
        self._positions = torch.zeros(size, dtype=torch.int64)
        self._slot_mapping = torch.zeros(size, dtype=torch.int64)
        self._input_ids_np = self._input_ids.numpy()
        self._positions_np = self._positions.numpy()
        self._slot_mapping_np = self._slot_mapping.numpy()

    def prefill(self, tasks: list[Task]) -> StepTiming:
        """Feed one piece of at most max_prefill_tokens tokens: whole rows in order, or a part of a long one.

        `tasks` are not done. A row of at most max_prefill_tokens is never cut.
        """
        budget = self.max_prefill_tokens
        pieces: list[tuple[Task, int]] = []
        for task in tasks:
            rest = len(task.token_ids) - task.fed
            if rest > budget and pieces:
                break
            pieces.append((task, min(rest, budget)))
            budget -= pieces[-1][1]
            if budget == 0 or len(pieces) == self.max_rows:
                break
        return self._run(pieces)

    def decode(self, tasks: list[Task]) -> StepTiming:
        """Feed the one token of each of at most max_rows tasks."""
        return self._run([(task, 1) for task in tasks])

    def settle(self, task: Task) -> None:
        """Leave a task that is stopped before its last token at what was computed."""
        if task.carry is not None:
            self._keep([task], task.carry[None])

    @torch.inference_mode()
    def check(self) -> None:
        """Run one forward over the reserved block 0. Raises what the device raises."""
        self._input_ids_np[0] = self._positions_np[0] = self._slot_mapping_np[0] = 0
        table = torch.zeros(1, 1, dtype=torch.int32)
        self.attention.prepare(AttentionMetadata([1], [1], table, self._slot_mapping[:1]), graph_mode=False)
        self.model.logits(self.model.forward(self._input_ids[:1], self._positions[:1], self._context))

    @torch.inference_mode()
    def _run(self, pieces: list[tuple[Task, int]]) -> StepTiming:
        began = time.perf_counter()
        tokens = self._stage(pieces)
        prepared = time.perf_counter()
        hidden = self.model.forward(self._input_ids[:tokens], self._positions[:tokens], self._context)
        ends = np.cumsum([count for _, count in pieces])
        last = hidden if tokens == len(pieces) else hidden[torch.from_numpy(ends - 1)]
        heads = [row for row, (task, count) in enumerate(pieces) if _needs_logits(task, count)]
        logits = self.model.logits(last if len(heads) == len(pieces) else last[heads]) if heads else None
        computed = time.perf_counter()
        for row, (task, count) in enumerate(pieces):
            if task.prompt_logprobs is not None:
                self._prompt_logprobs(task, count, hidden[ends[row] - count : ends[row]])
            task.carry = last[row]
            task.fed += count
            task.sequence.length += count
            task.done = task.fed == len(task.token_ids)
        if logits is not None:
            self._sample([pieces[row][0] for row in heads], logits)
        finished = [row for row, (task, _) in enumerate(pieces) if task.done and task.error is None]
        if finished:
            self._keep([pieces[row][0] for row in finished], last[finished])
        sampled = time.perf_counter()
        return StepTiming(len(pieces), tokens, prepared - began, computed - prepared, sampled - computed)

    def _keep(self, tasks: list[Task], hidden: torch.Tensor) -> None:
        """Remember the hidden states [N, hidden] of the sequences' last positions."""
        slots = [task.sequence.slot for task in tasks]
        self._last_hidden[slots] = hidden
        self._last_length[slots] = [task.sequence.length for task in tasks]

    def _stage(self, pieces: list[tuple[Task, int]]) -> int:
        """Write inputs, history and metadata of the next forward. Returns its number of tokens."""
        table = self.table
        block_size = table.block_size
        slots = [task.sequence.slot for task, _ in pieces]
        at = 0
        for task, count in pieces:
            slot, start = task.sequence.slot, task.sequence.length
            stop = at + count
            if count == 1:
                token = task.token_ids[task.fed]
                self._input_ids_np[at] = token
                self._positions_np[at] = start
                block = table.block_tables_np[slot, start // block_size]
                self._slot_mapping_np[at] = int(block) * block_size + start % block_size
                table.history_np[slot, start] = token
            else:
                ids = task.token_ids[task.fed : task.fed + count]
                positions = np.arange(start, start + count)
                self._input_ids_np[at:stop] = ids
                self._positions_np[at:stop] = positions
                blocks = table.block_tables_np[slot, positions // block_size].astype(np.int64)
                self._slot_mapping_np[at:stop] = blocks * block_size + positions % block_size
                table.history_np[slot, start : start + count] = ids
            at = stop
        kv_lengths = [task.sequence.length + count for task, count in pieces]
        width = blocks_for(max(kv_lengths), block_size)
        self.attention.prepare(
            AttentionMetadata(
                query_lengths=[count for _, count in pieces],
                kv_lengths=kv_lengths,
                block_tables=torch.from_numpy(table.block_tables_np[slots, :width]),
                slot_mapping=self._slot_mapping[:at],
            ),
            graph_mode=False,
        )
        return at

    def _sample(self, tasks: list[Task], logits: torch.Tensor) -> None:
        """Draw a token for every row of logits [R, vocab] whose task wants one."""
        drawing = [row for row, task in enumerate(tasks) if task.samples]
        for row, task in enumerate(tasks):
            if task.return_logits:
                task.logits = logits[row].numpy().copy()
        if not drawing:
            return
        if len(drawing) < len(tasks):
            tasks = [tasks[row] for row in drawing]
            logits = logits[drawing]
        rows = SampleRows(
            slots=[task.sequence.slot for task in tasks],
            lengths=[task.sequence.length for task in tasks],
            prompt_lengths=[task.sequence.prompt_length for task in tasks],
            bitmasks={row: task.bitmask for row, task in enumerate(tasks) if task.bitmask is not None},
        )
        self._accept(tasks, self.sampler.sample(logits, rows, self.table.history))

    def _accept(self, tasks: list[Task], sampled: SampledRows) -> None:
        for row, task in enumerate(tasks):
            status = sampled.status[row]
            if status is not RowStatus.OK:
                task.error = _SAMPLING_ERRORS[status]
                continue
            token = sampled.token_ids[row]
            task.sampled = TokenLogprobs(token, sampled.logprobs[row], sampled.top_logprobs[row])
            self.table.accept(task.sequence, token)

    def _prompt_logprobs(self, task: Task, count: int, hidden: torch.Tensor) -> None:
        """Logprobs of the piece's tokens, given hidden states [count, hidden] of their positions."""
        sequence = task.sequence
        before = task.carry
        if before is None and self._last_length[sequence.slot] == sequence.length > 0:
            before = self._last_hidden[sequence.slot]
        ids = task.token_ids[task.fed : task.fed + count]
        if before is None:
            ids, states = ids[1:], hidden[:-1]
        else:
            states = torch.cat((before[None], hidden[:-1]))
        if len(ids) and task.prompt_logprobs is not None:
            targets = torch.from_numpy(ids.astype(np.int64))
            own, top = prompt_logprobs(self.model.logits(states), targets, task.prompt_logprobs)
            task.prompt.extend(map(TokenLogprobs, ids.tolist(), own, top))


def _needs_logits(task: Task, count: int) -> bool:
    is_last_piece = task.fed + count == len(task.token_ids)
    return is_last_piece and (task.samples or task.return_logits)


_SAMPLING_ERRORS = {
    RowStatus.NOT_FINITE: RowError(
        "LOGITS_NOT_FINITE", "the model's logits hold NaN or infinity: the weights or the KV are damaged"
    ),
    RowStatus.NOTHING_ALLOWED: RowError(
        "NOTHING_ALLOWED", "allowed_token_bitmask and min_tokens together leave no token to sample"
    ),
}
