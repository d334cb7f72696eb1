"""Sessions: who may name which sequences, and which steps are answered from the record. Event loop only."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from decodestep.service.errors import MessageError
from decodestep.service.messages import Report
from decodestep.service.rows import Sequences
from decodestep.service.step_queue import Entry

DEFAULT_SESSION = "default"
SessionKey = tuple[str, str]  # identity of an authenticated client or "", and the session's name


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """An answer, perhaps still to come; then `entry` is the message on its way."""

    report: asyncio.Future[Report]
    entry: Entry | None


class StepRecord:
    """Answers by step id, so that a retry never steps twice."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._answers: OrderedDict[int, tuple[bytes, Answer]] = OrderedDict()
        self._horizon = -1  # the largest id that was forgotten
        self.last_step_id: int | None = None

    def find(self, step_id: int, digest: bytes) -> Answer | None:
        """The answer of a step that was seen before; None for a new one.

        Raises MessageError for an id that ran with other content, or that is forgotten.
        """
        known = self._answers.get(step_id)
        if known is None:
            if step_id <= self._horizon:
                raise MessageError(
                    "STEP_ID_FORGOTTEN",
                    f"step_id {step_id}: answers up to {self._horizon} are no longer kept",
                    metadata={"horizon": str(self._horizon)},
                )
            return None
        if known[0] != digest:
            raise MessageError("STEP_ID_REUSED", f"step_id {step_id} was given to another message before")
        return known[1]

    def entries(self, step_ids: Iterable[int]) -> list[Entry | None]:
        """The messages with these step ids that are on their way."""
        return [self._answers[step_id][1].entry for step_id in step_ids if step_id in self._answers]

    def add(self, step_id: int, digest: bytes, answer: Answer) -> None:
        """Record a step that is enqueued. One that comes to nothing is forgotten again."""
        self._answers[step_id] = (digest, answer)
        answer.report.add_done_callback(lambda done: self._settle(step_id, done))
        while len(self._answers) > self._window:
            forgotten, _ = self._answers.popitem(last=False)
            self._horizon = max(self._horizon, forgotten)

    def _settle(self, step_id: int, future: asyncio.Future[Report]) -> None:
        known = self._answers.get(step_id)
        if known is None or known[1].report is not future:
            return
        if future.cancelled() or future.exception() is not None:
            del self._answers[step_id]  # it never ran
            return
        self.last_step_id = max(step_id, self.last_step_id or 0)
        kept: asyncio.Future[Report] = future.get_loop().create_future()
        kept.set_result(_without_logits(future.result()))
        self._answers[step_id] = (known[0], Answer(kept, None))


def _without_logits(report: Report) -> Report:
    """Logits are too large to keep."""
    return dataclasses.replace(
        report,
        prefills=[dataclasses.replace(row, logits=None) for row in report.prefills],
        decodes=[dataclasses.replace(row, logits=None) for row in report.decodes],
    )


@dataclass(eq=False)
class Session:
    """One client's sequences and record."""

    name: str
    record: StepRecord
    sequences: Sequences = field(default_factory=Sequences)
    has_stream: bool = False
    is_bound: bool = False  # to a stream: it ends soon after the stream does
    calls: int = 0  # under way
    last_used: float = field(default_factory=time.monotonic)


class Sessions:
    """All living sessions."""

    def __init__(
        self, max_sessions: int, window: int, idle: float, grace: float, end: Callable[[Session], None]
    ) -> None:
        self._max_sessions = max_sessions
        self._window = window
        self._idle = idle
        self._grace = grace
        self._end = end
        self._by_key: dict[SessionKey, Session] = {}
        self._private: set[Session] = set()

    def get(self, key: SessionKey) -> Session | None:
        """The session, if it lives."""
        return self._by_key.get(key)

    def enter(self, key: SessionKey) -> Session:
        """The session for a call, made if need be; `leave` it afterwards. Raises MessageError."""
        session = self._by_key.get(key)
        if session is None:
            self._check_room()
            session = self._by_key[key] = Session(key[1], StepRecord(self._window))
        session.calls += 1
        return session

    def leave(self, session: Session) -> None:
        """A call is over."""
        session.calls -= 1
        session.last_used = time.monotonic()

    def open_stream(self, session: Session) -> None:
        """Bind the session to a stream. Raises MessageError if it has one."""
        if session.has_stream:
            raise MessageError("SESSION_HAS_STREAM", f"session {session.name} has an open Step stream")
        session.has_stream = True
        session.is_bound = session.name != DEFAULT_SESSION

    def open_private(self) -> Session:
        """A session that nobody can name. Raises MessageError."""
        self._check_room()
        session = Session("", StepRecord(1))
        self._private.add(session)
        return session

    def close_private(self, session: Session) -> None:
        """End a private session."""
        self._private.discard(session)
        self._end(session)

    async def run_expiry(self) -> None:
        """End sessions that nobody has used for long. Runs for ever."""
        while True:
            await asyncio.sleep(min(1.0, max(0.05, min(self._idle, self._grace) / 4)))
            now = time.monotonic()
            for key, session in list(self._by_key.items()):
                limit = self._grace if session.is_bound else self._idle
                if not session.calls and now - session.last_used >= limit:
                    del self._by_key[key]
                    self._end(session)

    def _check_room(self) -> None:
        living = len(self._by_key) + len(self._private)
        if living >= self._max_sessions:
            raise MessageError("TOO_MANY_SESSIONS", f"{living} sessions live, the most that may")
