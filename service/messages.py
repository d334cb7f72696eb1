"""One scheduler iteration and its answer, in the service's own types."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from decodestep.accel.errors import RowError
from decodestep.accel.executor import Bitmask, TokenIds, TokenLogprobs
from decodestep.accel.sampler.params import SamplingParams
from decodestep.accel.sequences import FinishReason


@dataclass(frozen=True, slots=True)
class Release:
    """End one sequence, or all of the session."""

    sequence_id: int
    all: bool = False


@dataclass(frozen=True, slots=True)
class Prefill:
    """Append tokens. `error` is what its own values are refused for."""

    sequence_id: int
    token_ids: TokenIds
    start_position: int = 0
    more: bool = False
    params: SamplingParams | None = None
    num_output_tokens: int = 0
    bitmask: Bitmask | None = None
    return_logits: bool = False
    error: RowError | None = None


@dataclass(frozen=True, slots=True)
class Decode:
    """Feed one token, the pending one if `token_id` is None. `error` as in Prefill."""

    sequence_id: int
    token_id: int | None = None
    kv_length: int | None = None
    truncate_to: int | None = None
    bitmask: Bitmask | None = None
    return_logits: bool = False
    error: RowError | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One queue entry: releases, then prefills, then decodes."""

    releases: list[Release] = field(default_factory=list)
    prefills: list[Prefill] = field(default_factory=list)
    decodes: list[Decode] = field(default_factory=list)
    no_merge: bool = False
    queue_timeout: float | None = None  # seconds

    @property
    def stepped_ids(self) -> set[int]:
        """The sequences of its prefill and decode rows."""
        return {row.sequence_id for row in self.prefills} | {row.sequence_id for row in self.decodes}

    @property
    def sequence_ids(self) -> set[int]:
        """Every sequence it names."""
        return self.stepped_ids | {row.sequence_id for row in self.releases}


class Outcome(enum.Enum):
    """What happened to a row."""

    SAMPLED = "SAMPLED"
    APPENDED = "APPENDED"
    SKIPPED_FINISHED = "SKIPPED_FINISHED"
    FAILED = "FAILED"


@dataclass(slots=True)
class RowReport:
    """What became of a prefill or decode row."""

    sequence_id: int
    outcome: Outcome
    kv_length: int
    sampled: TokenLogprobs | None = None
    finish: FinishReason | None = None
    error: RowError | None = None
    seed: int | None = None
    prompt: list[TokenLogprobs] = field(default_factory=list)
    prompt_start: int = 0  # position of the first entry of `prompt`
    logits: npt.NDArray[np.float32] | None = None


@dataclass(slots=True)
class ReleaseReport:
    """What became of a release."""

    sequence_id: int
    freed_blocks: int = 0
    error: RowError | None = None


@dataclass(frozen=True, slots=True)
class ExecutionReport:
    """One device step that ran for a message."""

    is_prefill: bool
    rows: int
    tokens: int


@dataclass(slots=True)
class Report:
    """Answer to a Message. Times in seconds."""

    releases: list[ReleaseReport] = field(default_factory=list)
    prefills: list[RowReport] = field(default_factory=list)
    decodes: list[RowReport] = field(default_factory=list)
    free_blocks: int = 0
    executions: list[ExecutionReport] = field(default_factory=list)
    queue: float = 0.0
    prepare: float = 0.0
    device: float = 0.0
    sample: float = 0.0
