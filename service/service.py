"""What all RPCs share: the loaded engine, the sessions, and the way of a message into the queue and back."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass

from decodestep.accel.loader import Engine
from decodestep.service.errors import Context, MessageError
from decodestep.service.messages import Message, Release, Report
from decodestep.service.options import ServeOptions
from decodestep.service.sessions import DEFAULT_SESSION, Answer, Session, SessionKey, Sessions
from decodestep.service.step_queue import Entry, StepQueue
from decodestep.service.tokenizer import Tokenizer
from decodestep.service.validation import STEP_NAMES, Bounds, Names, check_message, parse_message
from decodestep.v1 import step_pb2

_SESSION_KEY = "decodestep-session"
_MAX_SESSION_NAME = 256


@dataclass(frozen=True, slots=True)
class Loaded:
    """What is there once the model is loaded."""

    engine: Engine
    queue: StepQueue
    tokenizer: Tokenizer | None
    bounds: Bounds


@dataclass(frozen=True, slots=True, eq=False)
class Submitted:
    """A message on its way, or one with the same step id that was on it before."""

    answer: Answer
    arrived: float
    from_record: bool = False  # nothing runs for this call

    async def wait(self) -> Report:
        """The answer. Raises MessageError. Cancelling the caller does not cancel the message."""
        return await asyncio.shield(self.answer.report)


class Service:
    """Lives on the event loop. RPCs reach the device through `submit` only."""

    def __init__(self, options: ServeOptions) -> None:
        self.options = options
        self.instance_id = secrets.token_hex(8)
        self.started = time.monotonic()
        self._loaded: Loaded | None = None
        self._refusal = MessageError("LOADING", "the model is loading")
        self.sessions = Sessions(
            options.max_sessions,
            options.step_id_window,
            options.session_idle,
            options.stream_grace,
            self._end_session,
        )

    def open(self, loaded: Loaded) -> None:
        """Serve from now on."""
        self._loaded = loaded

    def refuse(self, reason: str, message: str) -> None:
        """Serve no more steps."""
        self._loaded = None
        self._refusal = MessageError(reason, message)

    @property
    def loaded(self) -> Loaded:
        """Raises MessageError while there is nothing to serve."""
        if self._loaded is None:
            raise self._refusal
        return self._loaded

    @property
    def free_blocks(self) -> int:
        """KV blocks that nobody holds; 0 while there are none."""
        return 0 if self._loaded is None else self._loaded.engine.executor.table.allocator.num_free

    def session_key(self, context: Context) -> SessionKey:
        """Identity and name of the session that a call names. Raises MessageError."""
        name = DEFAULT_SESSION
        for key, value in context.invocation_metadata() or ():
            if key == _SESSION_KEY:
                name = value if isinstance(value, str) else value.decode()
        if not 0 < len(name) <= _MAX_SESSION_NAME:
            expected = f"1 to {_MAX_SESSION_NAME} characters, not {len(name)}"
            raise MessageError("INVALID_MESSAGE", "a session's name", [(_SESSION_KEY, expected)])
        identities = context.peer_identities() or ()
        return b"\n".join(identities).hex(), name

    async def parse(self, request: step_pb2.StepRequest, names: Names = STEP_NAMES) -> Message:
        """Check a request and turn it into a message. Raises MessageError."""
        loaded = self.loaded
        check_message(request, loaded.bounds, names)
        texts = {}
        for index, row in enumerate(request.prefills):
            if row.text and not row.token_ids:
                texts[index] = await self.tokenize(row.text)
        return parse_message(request, texts, loaded.bounds, names)

    async def tokenize(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text, computed beside the event loop. Raises MessageError."""
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens)

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises MessageError where the model has none."""
        tokenizer = self.loaded.tokenizer
        if tokenizer is None:
            raise MessageError("NO_TOKENIZER", f"{self.options.model} has no tokenizer")
        return tokenizer

    def submit_request(
        self,
        session: Session,
        message: Message,
        request: step_pb2.StepRequest,
        must_fit: bool,
        arrived: float,
    ) -> Submitted:
        """Enqueue a request's message, unless its step id was seen before. Raises MessageError.

        Takes from `request` what does not count as content.
        """
        if not request.HasField("step_id"):
            return self.submit(session, message, must_fit, arrived)
        request.ClearField("queue_timeout_ms")
        request.ClearField("cancel")
        digest = hashlib.blake2b(request.SerializeToString(deterministic=True), digest_size=16).digest()
        known = session.record.find(request.step_id, digest)
        if known is not None:
            if known.entry is not None:
                known.entry.num_waiting += 1
            return Submitted(known, arrived, from_record=True)
        submitted = self.submit(session, message, must_fit, arrived)
        session.record.add(request.step_id, digest, submitted.answer)
        return submitted

    def submit(self, session: Session, message: Message, must_fit: bool, arrived: float) -> Submitted:
        """Enqueue a message. Raises MessageError."""
        future: asyncio.Future[Report] = asyncio.get_running_loop().create_future()
        # Where nobody waits for the answer any more, an error in it is nobody's concern.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        entry = Entry(session.sequences, message, future, arrived)
        self.loaded.queue.put(entry, must_fit)
        return Submitted(Answer(future, entry), arrived)

    def drop(self, session: Session, submitted: Iterable[Submitted]) -> None:
        """The client is gone: what has not started, and no other call waits for, goes as if it never came."""
        entries = []
        for one in submitted:
            entry = one.answer.entry
            if entry is not None:
                entry.num_waiting -= 1
                if entry.num_waiting == 0:
                    entries.append(entry)
        if entries and self._loaded is not None:
            for entry in self._loaded.queue.drop(session.sequences, entries):
                entry.future.cancel()

    def cancel(self, session: Session, cancellation: step_pb2.Cancellation) -> int:
        """Tell rows and messages of the session that have not run to fail. Returns how many were told."""
        sequence_ids, step_ids = set(cancellation.sequence_ids), set(cancellation.step_ids)
        told = 0
        named = session.record.entries(step_ids)
        for entry in self.loaded.queue.entries(session.sequences):
            if entry in named:
                entry.is_cancelled = True
                told += 1
            rows = entry.message.stepped_ids & sequence_ids
            entry.cancelled_ids |= rows
            told += len(rows)
        return told

    def _end_session(self, session: Session) -> None:
        """Release all that a session holds, once what runs for it is done."""
        if self._loaded is None:
            return
        queue = self._loaded.queue
        for entry in queue.drop(session.sequences, queue.entries(session.sequences)):
            entry.future.cancel()
        message = Message(releases=[Release(0, all=True)])
        with contextlib.suppress(MessageError):  # the queue is closed: everything ends
            self.submit(session, message, must_fit=False, arrived=time.perf_counter())
