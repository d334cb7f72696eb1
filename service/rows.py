"""Rows meet sequences: what may run, what it becomes, and how it is undone. Only on the device's thread."""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass, field

import numpy as np

from decodestep.accel.errors import RowError
from decodestep.accel.executor import Task
from decodestep.accel.sampler.params import SamplingParams
from decodestep.accel.sequences import FinishReason, Sequence, SequenceTable
from decodestep.service.messages import Decode, Outcome, Prefill, Release, ReleaseReport, RowReport


@dataclass(frozen=True, slots=True)
class SequenceView:
    """State of a sequence after its last row, for anyone to read."""

    kv_length: int
    num_output_tokens: int
    pending: int | None
    num_blocks: int
    finish: FinishReason | None
    is_broken: bool


@dataclass(eq=False)
class Sequences:
    """The sequences of one session. `views` is replaced entry by entry: other threads may read it."""

    by_id: dict[int, Sequence] = field(default_factory=dict)
    views: dict[int, SequenceView] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Admitted:
    """A row that may run: its task, and what to go back to if it fails."""

    sequence_id: int
    task: Task
    owner: Sequences
    is_new: bool
    prompt_length: int
    params: SamplingParams
    pending: int | None
    finish: FinishReason | None


class Rows:
    """Admits, finishes and undoes rows."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table

    def release(self, owner: Sequences, row: Release) -> list[ReleaseReport]:
        """End one sequence, or all."""
        if row.all:
            return [self._close(owner, sequence_id) for sequence_id in list(owner.by_id)]
        if row.sequence_id not in owner.by_id:
            return [ReleaseReport(row.sequence_id, error=_not_found(row.sequence_id))]
        return [self._close(owner, row.sequence_id)]

    def admit_prefill(self, owner: Sequences, row: Prefill) -> Admitted | RowReport:
        """Check a prefill row against its sequence, reserve blocks for all of it and make its task."""
        sequence = owner.by_id.get(row.sequence_id)
        try:
            if row.error is not None:
                raise row.error
            return self._prefill(owner, row, sequence)
        except RowError as error:
            return self._refuse(owner, row.sequence_id, error)

    def admit_decode(self, owner: Sequences, row: Decode) -> Admitted | RowReport:
        """Check a decode row against its sequence, reserve a block if it needs one and make its task."""
        sequence = owner.by_id.get(row.sequence_id)
        try:
            if row.error is not None:
                raise row.error
            if sequence is None:
                raise _not_found(row.sequence_id)
            return self._decode(owner, row, sequence)
        except RowError as error:
            return self._refuse(owner, row.sequence_id, error)

    def finish(self, row: Admitted) -> RowReport:
        """What became of a row whose task is done. A row whose draw failed is undone."""
        task, sequence = row.task, row.task.sequence
        if task.error is not None:
            return self.undo(row, task.error)
        report = RowReport(
            row.sequence_id,
            Outcome.SAMPLED if task.samples else Outcome.APPENDED,
            sequence.length,
            sampled=task.sampled,
            finish=sequence.finish,
            prompt=task.prompt,
            prompt_start=sequence.length - len(task.prompt),
            logits=task.logits,
        )
        if task.samples and not sequence.seed_told:
            sequence.seed_told = True
            report.seed = sequence.params.seed
        self._publish(row.owner, row.sequence_id, sequence)
        return report

    def undo(self, row: Admitted, error: RowError) -> RowReport:
        """Put the sequence back to where the row began; one that the row created goes."""
        sequence = row.task.sequence
        if row.is_new:
            self._close(row.owner, row.sequence_id)
            return RowReport(row.sequence_id, Outcome.FAILED, 0, error=error)
        self._table.truncate(sequence, row.task.start_length)
        sequence.prompt_length = row.prompt_length
        if sequence.params is not row.params:
            self._table.set_params(sequence, row.params)
        sequence.pending, sequence.finish = row.pending, row.finish
        return self._refuse(row.owner, row.sequence_id, error)

    def stop(self, row: Admitted, error: RowError) -> RowReport:
        """End a row before its next piece. What was computed stays; a sequence without any of it goes."""
        if row.task.fed == 0:
            return self.undo(row, error)
        sequence = row.task.sequence
        self._table.truncate(sequence, sequence.length)  # frees the blocks of what will not come
        return self._refuse(row.owner, row.sequence_id, error)

    def refuse(self, owner: Sequences, sequence_id: int, error: RowError) -> RowReport:
        """Fail a row that was not admitted."""
        return self._refuse(owner, sequence_id, error)

    def _prefill(self, owner: Sequences, row: Prefill, sequence: Sequence | None) -> Admitted:
        table = self._table
        start, count = row.start_position, len(row.token_ids)
        if sequence is not None and start == 0:
            raise RowError(
                "SEQUENCE_EXISTS",
                f"sequence {row.sequence_id} lives, with {sequence.length} tokens",
                {"kv_length": str(sequence.length)},
            )
        if sequence is None and start != 0:
            raise _not_found(row.sequence_id)
        if sequence is not None and start != sequence.length:
            raise _length_mismatch("start_position", start, sequence.length)
        if start + count > table.context_length:
            raise _context_exceeded(start, count, table.context_length)
        is_new = sequence is None
        if sequence is None:
            sequence = table.open(row.params or default_params())
            owner.by_id[row.sequence_id] = sequence
        try:
            table.reserve(sequence, start + count)
        except RowError:
            if is_new:
                self._close(owner, row.sequence_id)
            raise
        admitted = self._admit(owner, row.sequence_id, sequence, is_new)
        if row.params is not None and not is_new:
            table.set_params(sequence, row.params)
        if row.num_output_tokens < count or start == 0:
            sequence.prompt_length = start + count - row.num_output_tokens
        sequence.pending, sequence.finish, sequence.is_broken = None, None, False
        admitted.task = Task(
            sequence,
            row.token_ids,
            samples=not row.more,
            bitmask=row.bitmask,
            return_logits=row.return_logits,
            prompt_logprobs=sequence.params.prompt_logprobs,
        )
        return admitted

    def _decode(self, owner: Sequences, row: Decode, sequence: Sequence) -> Admitted | RowReport:
        if sequence.is_broken and (row.token_id is None or row.kv_length is None):
            raise RowError(
                "CHAIN_BROKEN",
                f"an earlier row of sequence {row.sequence_id} failed",
                {"kv_length": str(sequence.length)},
            )
        if sequence.finish is not None and row.token_id is None:
            return RowReport(
                row.sequence_id, Outcome.SKIPPED_FINISHED, sequence.length, finish=sequence.finish
            )
        if row.kv_length is not None and row.kv_length != sequence.length:
            raise _length_mismatch("kv_length", row.kv_length, sequence.length)
        start = sequence.length if row.truncate_to is None else row.truncate_to
        if start > sequence.length:
            raise RowError(
                "TRUNCATE_OUT_OF_RANGE",
                f"truncate_to {start}, but the KV length is {sequence.length}",
                {"kv_length": str(sequence.length)},
            )
        token_id = row.token_id
        if token_id is None:
            # Behind a cut, and where nothing was sampled, only the caller knows what comes next.
            if start < sequence.length or sequence.pending is None:
                raise RowError("NO_PENDING_TOKEN", f"sequence {row.sequence_id} has no token to go on from")
            token_id = sequence.pending
        if start >= self._table.context_length:
            raise _context_exceeded(start, 1, self._table.context_length)
        self._table.reserve(sequence, start + 1)
        if start < sequence.length:
            # Not undone if the draw fails: the row writes over the KV at `start`.
            self._table.truncate(sequence, start)
            sequence.pending = None
            self._table.reserve(sequence, start + 1)
        admitted = self._admit(owner, row.sequence_id, sequence, is_new=False)
        sequence.pending, sequence.finish, sequence.is_broken = None, None, False
        admitted.task = Task(
            sequence,
            np.array([token_id], dtype=np.int32),
            bitmask=row.bitmask,
            return_logits=row.return_logits,
        )
        return admitted

    @staticmethod
    def _admit(owner: Sequences, sequence_id: int, sequence: Sequence, is_new: bool) -> Admitted:
        """Note the sequence's state; the caller sets the task."""
        return Admitted(
            sequence_id,
            Task(sequence, _NO_TOKENS),
            owner,
            is_new,
            sequence.prompt_length,
            sequence.params,
            sequence.pending,
            sequence.finish,
        )

    def _refuse(self, owner: Sequences, sequence_id: int, error: RowError) -> RowReport:
        """A failed row. Rows that were sent ahead of knowing must not run: its sequence is broken."""
        sequence = owner.by_id.get(sequence_id)
        if sequence is None:
            return RowReport(sequence_id, Outcome.FAILED, 0, error=error)
        sequence.is_broken = True
        self._publish(owner, sequence_id, sequence)
        return RowReport(sequence_id, Outcome.FAILED, sequence.length, finish=sequence.finish, error=error)

    def _close(self, owner: Sequences, sequence_id: int) -> ReleaseReport:
        owner.views.pop(sequence_id, None)
        return ReleaseReport(sequence_id, self._table.close(owner.by_id.pop(sequence_id)))

    def _publish(self, owner: Sequences, sequence_id: int, sequence: Sequence) -> None:
        owner.views[sequence_id] = SequenceView(
            sequence.length,
            self._table.num_output_tokens(sequence),
            sequence.pending,
            len(sequence.blocks),
            sequence.finish,
            sequence.is_broken,
        )


_NO_TOKENS = np.empty(0, dtype=np.int32)


def default_params() -> SamplingParams:
    """Greedy; with a seed, in case a later row samples."""
    return dataclasses.replace(SamplingParams(), seed=secrets.randbits(64))


def _not_found(sequence_id: int) -> RowError:
    return RowError("SEQUENCE_NOT_FOUND", f"the session has no sequence {sequence_id}")


def _length_mismatch(name: str, given: int, length: int) -> RowError:
    return RowError(
        "KV_LENGTH_MISMATCH", f"{name} {given}, but the KV length is {length}", {"kv_length": str(length)}
    )


def _context_exceeded(start: int, count: int, context_length: int) -> RowError:
    return RowError(
        "CONTEXT_EXCEEDED",
        f"{count} tokens at position {start} reach past the {context_length} positions of a sequence",
        {"context_length": str(context_length), "kv_length": str(start)},
    )
