"""A small scheduler with continuous batching: how to drive the Step stream. To read, to use, or to outgrow.

Every iteration is one message: it releases what has ended, sends prompts or chunks of prompts up to a budget
of tokens, and advances every running sequence. The next message is sent before the answer to this is read,
so the device does not wait; a decode row names no token, because the server knows what it has sampled.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType

from decodestep.client.client import Client
from decodestep.client.errors import ServiceError
from decodestep.client.types import (
    DecodeRow,
    FinishReason,
    Outcome,
    PrefillRow,
    RowResult,
    SamplingParams,
    Step,
    StepResult,
)

_NO_ROOM = ("NO_FREE_BLOCKS", "NO_FREE_SEQUENCES")


@dataclass(eq=False, slots=True)
class Request:
    """One prompt and what became of it."""

    prompt: Sequence[int]
    sampling: SamplingParams
    on_token: Callable[[Request, int], None] | None = None
    output: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: ServiceError | None = None
    is_cancelled: bool = False
    submitted: float = field(default_factory=time.perf_counter)
    token_times: list[float] = field(default_factory=list)

    # The scheduler's.
    sequence_id: int = 0  # a new one each time it is admitted; 0: it is not
    sent: int = 0  # of `tokens`, those that were sent or that the server has sampled
    ahead: int = 0  # tokens that rows in flight will sample

    @property
    def is_done(self) -> bool:
        """Finished, failed or cancelled."""
        return self.finish_reason is not None or self.error is not None or self.is_cancelled

    @property
    def tokens(self) -> list[int]:
        """What has to be fed: the prompt and, where it is recomputed, what was generated."""
        return [*self.prompt, *self.output]

    @property
    def may_go_on(self) -> bool:
        """Whether one more token is wanted, counting those in flight."""
        limit = self.sampling.max_tokens
        return limit is None or len(self.output) + self.ahead < limit


class Scheduler:
    """Runs requests over one Step stream of a client. Call `step` until nothing is left, from one thread."""

    def __init__(
        self,
        client: Client,
        *,
        prefill_tokens: int | None = None,
        in_flight: int = 2,
        on_result: Callable[[StepResult], None] | None = None,
    ) -> None:
        """`prefill_tokens`: of prompts, in one iteration. `in_flight`: messages sent ahead of answers."""
        info = client.server_info()
        self._max_rows = info.limits.max_rows
        self._block_size = info.kv_cache.block_size
        self._in_flight = min(in_flight, info.limits.max_in_flight)
        self._prefill_tokens = prefill_tokens or info.limits.max_prefill_tokens
        self._free_blocks = info.kv_cache.free_blocks
        self._stream = client.step_stream()
        self._ids = itertools.count(1)
        self._waiting: deque[Request] = deque()
        self._admitted: dict[int, Request] = {}  # by sequence id, in order of admission
        self._to_release: list[int] = []
        self._promised: deque[int] = deque()  # blocks that each message in flight may take
        self._on_result = on_result

    def __enter__(self) -> Scheduler:
        """Open already."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the stream; the server ends the session soon after."""
        self._stream.close()

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        on_token: Callable[[Request, int], None] | None = None,
    ) -> Request:
        """Queue a prompt. `on_token` is called in `step`, for each token."""
        if sampling.seed is None and sampling.temperature > 0:
            # Recomputation must go on with the same numbers, so the seed has to be ours.
            sampling = replace(sampling, seed=time.time_ns())
        request = Request(prompt, sampling, on_token)
        self._waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Give a request up; its blocks are free with the next message."""
        if request.is_done:
            return
        request.is_cancelled = True
        if request in self._waiting:
            self._waiting.remove(request)
        self._let_go(request)

    def step(self) -> bool:
        """Send messages ahead, then take one answer. Returns whether there is more to do."""
        while self._stream.in_flight < self._in_flight:
            message = self._next_message()
            if message is None:
                break
            self._stream.send(message)
        if self._stream.in_flight:
            self._take(self._stream.receive())
        return bool(self._waiting or self._admitted or self._to_release or self._stream.in_flight)

    def run(self) -> None:
        """Step until nothing is left."""
        while self.step():
            pass

    # Before: what the next message holds.

    def _next_message(self) -> Step | None:
        promised = 0
        prefills: list[PrefillRow] = []
        decodes: list[DecodeRow] = []
        budget = self._prefill_tokens
        for request in self._admitted.values():
            if request.sent < len(request.tokens):
                if budget > 0 and len(prefills) < self._max_rows:
                    prefills.append(self._chunk(request, budget))
                    budget -= len(prefills[-1].token_ids)
            elif request.may_go_on and len(decodes) < self._max_rows:
                decodes.append(DecodeRow(request.sequence_id))
                request.ahead += 1
                promised += 1  # it may begin a block
        while budget > 0 and len(prefills) < self._max_rows and self._waiting:
            request = self._waiting[0]
            needed = self._blocks(len(request.tokens) + 1)
            # One block more for each that runs: they grow, too.
            spare = self._free_blocks - sum(self._promised) - promised - len(self._admitted)
            if needed > spare and self._admitted:
                break
            promised += needed
            self._admit(self._waiting.popleft())
            prefills.append(self._chunk(request, budget))
            budget -= len(prefills[-1].token_ids)
        releases, self._to_release = self._to_release, []
        if not (releases or prefills or decodes):
            return None
        self._promised.append(promised)
        return Step(cancel=releases, releases=releases, prefills=prefills, decodes=decodes)

    def _admit(self, request: Request) -> None:
        request.sequence_id = next(self._ids)
        request.sent = request.ahead = 0
        self._admitted[request.sequence_id] = request

    def _chunk(self, request: Request, budget: int) -> PrefillRow:
        start, tokens = request.sent, request.tokens
        chunk = tokens[start : start + budget]
        request.sent += len(chunk)
        is_last = request.sent == len(tokens)
        if is_last:
            request.ahead += 1
        generated = max(0, request.sent - len(request.prompt))
        return PrefillRow(
            request.sequence_id,
            chunk,
            start_position=start,
            more=not is_last,
            sampling=request.sampling if start == 0 else None,
            num_output_tokens=min(generated, len(chunk)),
        )

    # After: what an answer means.

    def _take(self, result: StepResult) -> None:
        if self._on_result is not None:
            self._on_result(result)
        self._promised.popleft()
        self._free_blocks = result.free_blocks
        if result.error is not None:
            raise result.error  # a message of ours is never refused whole, unless the server ends
        now = time.perf_counter()
        for row in (*result.prefills, *result.decodes):
            request = self._admitted.get(row.sequence_id)
            if request is not None:  # else it was let go: rows that were on their way say nothing new
                self._take_row(request, row, now)

    def _take_row(self, request: Request, row: RowResult, now: float) -> None:
        if row.outcome is Outcome.FAILED:
            self._take_failure(request, row)
            return
        if row.token is None:
            return
        request.ahead -= 1
        request.output.append(row.token.token_id)
        request.sent += 1  # the server has it
        request.token_times.append(now)
        if row.finish_reason is not None:
            request.finish_reason = row.finish_reason
            self._let_go(request)
        if request.on_token is not None:
            request.on_token(request, row.token.token_id)

    def _take_failure(self, request: Request, row: RowResult) -> None:
        error = row.error
        if error is None:
            return
        has_room_elsewhere = len(self._admitted) > 1 or bool(self._to_release)
        self._let_go(request)
        if error.reason in _NO_ROOM and has_room_elsewhere:
            # Preempt: the youngest fail first, because rows stand in order of admission. Later it is
            # recomputed from its tokens and goes on as if nothing had been.
            self._waiting.appendleft(request)
        else:
            request.error = error

    def _let_go(self, request: Request) -> None:
        """Release its sequence with the next message."""
        if self._admitted.pop(request.sequence_id, None) is not None:
            self._to_release.append(request.sequence_id)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)
