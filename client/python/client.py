"""A client for threads: calls return when their answer is there."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import grpc

from decodestep.client import _wire
from decodestep.client._channel import CHANNEL_OPTIONS, DEFAULT_TARGET, DEFAULT_TIMEOUT, Retry, SessionName
from decodestep.client.errors import ServerRestartedError, ServiceError
from decodestep.client.types import (
    DecodeRow,
    Message,
    Piece,
    PrefillRow,
    SamplingParams,
    ServerInfo,
    SessionInfo,
    Step,
    StepResult,
)
from decodestep.v1 import info_pb2, service_pb2_grpc, step_pb2, tokenizer_pb2, tokenizer_pb2_grpc

T = TypeVar("T")


class Client:
    """Talks to one server, in one session. Threads may share it.

    Every call that changes anything has a step id and is sent again when the connection fails, up to its
    timeout: it never steps twice. Errors are raised as ServiceError; those of single rows are in the results.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        session: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        """`session`: None makes one that ends with the client. `timeout`: seconds, if a call states none."""
        if credentials is None:
            self._channel = grpc.insecure_channel(target, CHANNEL_OPTIONS)
        else:
            self._channel = grpc.secure_channel(target, credentials, CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.DecodeStepServiceStub(self._channel)
        self._tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(self._channel)
        self._session = SessionName(session)
        self.timeout = timeout

    @property
    def session(self) -> str:
        """The session's name."""
        return self._session.name

    def __enter__(self) -> Client:
        """Nothing to do: the channel connects by itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Release what a session of one's own holds, and end all calls."""
        if self._session.is_own:
            with contextlib.suppress(ServiceError):
                self.release(all=True, timeout=1)
        self._channel.close()

    def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """What the server is, holds and allows. Waits until it has started and loaded its model."""
        return _wire.server_info(
            self._call(self._stub.GetServerInfo, info_pb2.GetServerInfoRequest(), timeout)
        )

    def session_info(self, *, timeout: float | None = None) -> SessionInfo:
        """The sequences of the session."""
        return _wire.session_info(self._call(self._stub.GetSession, info_pb2.GetSessionRequest(), timeout))

    def prefill(
        self, rows: Iterable[PrefillRow], *, queue_timeout: float | None = None, timeout: float | None = None
    ) -> StepResult:
        """Append prompts and sample the first token of each."""
        request = step_pb2.PrefillRequest(
            step_id=self._session.next_step_id(),
            queue_timeout_ms=_wire.milliseconds(queue_timeout),
            rows=map(_wire.prefill_row, rows),
        )
        return _wire.step_result(self._call(self._stub.Prefill, request, timeout))

    def decode(
        self,
        rows: Iterable[DecodeRow],
        *,
        no_merge: bool = False,
        queue_timeout: float | None = None,
        timeout: float | None = None,
    ) -> StepResult:
        """Advance sequences by one token."""
        request = step_pb2.DecodeStepRequest(
            step_id=self._session.next_step_id(),
            queue_timeout_ms=_wire.milliseconds(queue_timeout),
            no_merge=no_merge,
            rows=map(_wire.decode_row, rows),
        )
        return _wire.step_result(self._call(self._stub.DecodeStep, request, timeout))

    def release(
        self, sequence_ids: Iterable[int] = (), *, all: bool = False, timeout: float | None = None
    ) -> StepResult:
        """End sequences and free their blocks."""
        request = step_pb2.ReleaseRequest(
            step_id=self._session.next_step_id(), sequence_ids=sequence_ids, all=all
        )
        return _wire.step_result(self._call(self._stub.Release, request, timeout))

    def cancel(
        self,
        sequence_ids: Iterable[int] = (),
        *,
        step_ids: Iterable[int] = (),
        timeout: float | None = None,
    ) -> int:
        """Stop work that waits, or a prompt under way. Returns how many rows and messages were told."""
        cancellation = step_pb2.Cancellation(sequence_ids=sequence_ids, step_ids=step_ids)
        request = step_pb2.CancelRequest(cancel=cancellation)
        return self._call(self._stub.Cancel, request, timeout).cancelled

    def tokenize(
        self,
        text: str = "",
        *,
        messages: Sequence[Message] = (),
        add_special_tokens: bool = False,
        add_generation_prompt: bool = True,
        template_arguments: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[int]:
        """Token ids of a text, or of chat messages in the model's template."""
        request = _wire.tokenize_request(
            text, messages, add_special_tokens, add_generation_prompt, template_arguments
        )
        return list(self._call(self._tokenizer.Tokenize, request, timeout).token_ids)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        context_token_ids: Sequence[int] = (),
        partial: bool = False,
        keep_special_tokens: bool = False,
        timeout: float | None = None,
    ) -> tuple[str, int]:
        """Text of tokens, and how many of them are in it: all, unless `partial`."""
        request = tokenizer_pb2.DetokenizeRequest(
            token_ids=token_ids,
            context_token_ids=context_token_ids,
            partial=partial,
            keep_special_tokens=keep_special_tokens,
        )
        response = self._call(self._tokenizer.Detokenize, request, timeout)
        return response.text, response.consumed

    def generate(
        self,
        text: str = "",
        *,
        token_ids: Sequence[int] = (),
        messages: Sequence[Message] = (),
        sampling: SamplingParams | None = None,
        timeout: float | None = None,
    ) -> Iterator[Piece]:
        """Continue a prompt, piece by piece. Closing the iterator cancels. Never sent again by itself."""
        request = _wire.generate_request(text, token_ids, messages, sampling)
        call = self._stub.Generate(request, timeout=timeout, metadata=self._session.metadata)
        try:
            for response in call:
                yield _wire.piece(response)
        except grpc.RpcError as error:
            raise _wire.error_of(error) from error
        finally:
            call.cancel()  # type: ignore[no-untyped-call]

    def step_stream(self) -> StepStream:
        """Open a Step stream. A session has one at a time."""
        return StepStream(self, self._stub.Step, self._session)

    def _call(self, rpc: Callable[..., T], request: object, timeout: float | None) -> T:
        retry = Retry(self.timeout if timeout is None else timeout)
        while True:
            try:
                return rpc(request, timeout=retry.remaining, metadata=self._session.metadata)
            except grpc.RpcError as error:
                delay = retry.delay_after(_wire.error_of(error))
            time.sleep(delay)


class StepStream:
    """A Step stream: send any number of steps, up to the server's max_in_flight ahead of the answers.

    When the connection fails, all that was not answered is sent again under its step ids. For one thread.
    """

    def __init__(self, client: Client, rpc: Callable[..., Any], session: SessionName) -> None:
        self._client = client
        self._rpc = rpc
        self._session = session
        self._unanswered: deque[step_pb2.StepRequest] = deque()
        self._outgoing: queue.SimpleQueue[step_pb2.StepRequest | None] = queue.SimpleQueue()
        self._call: Any = None
        self._instance_id = ""
        self._open()

    def __enter__(self) -> StepStream:
        """Open already."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    @property
    def in_flight(self) -> int:
        """Steps that were sent and not answered."""
        return len(self._unanswered)

    def send(self, step: Step) -> int:
        """Send a step without waiting for anything. Returns its step id."""
        request = _wire.step_request(step, self._session.next_step_id())
        self._unanswered.append(request)
        self._outgoing.put(request)
        return request.step_id

    def receive(self, timeout: float | None = None) -> StepResult:
        """The answer to the oldest step that has none. A step that failed whole has `error` in its result.

        Raises ServiceError, with DEADLINE_EXCEEDED after `timeout` seconds: receiving again goes on waiting.
        Raises ServerRestartedError when the connection comes back to another server.
        """
        if not self._unanswered:
            raise ValueError("nothing is in flight: send a step first")
        retry = Retry(self._client.timeout)
        timed_out = threading.Event()

        def give_up() -> None:
            timed_out.set()
            self._call.cancel()

        timer = threading.Timer(timeout, give_up) if timeout is not None else None
        if timer is not None:
            timer.start()
        try:
            while True:
                try:
                    response = next(self._call)
                    break
                except StopIteration:
                    failure = ServiceError("UNAVAILABLE", "the server ended the stream")
                except grpc.RpcError as error:
                    failure = _wire.error_of(error)
                if timed_out.is_set():
                    self._open()
                    raise ServiceError("DEADLINE_EXCEEDED", f"no answer within {timeout} s")
                time.sleep(retry.delay_after(failure, also="SESSION_HAS_STREAM"))
                self._check_instance(retry.remaining)
                self._open()
        finally:
            if timer is not None:
                timer.cancel()
        self._unanswered.popleft()
        self._instance_id = response.instance_id
        return _wire.step_result(response)

    def close(self) -> None:
        """End the stream; steps that have not run do not."""
        self._outgoing.put(None)
        self._call.cancel()

    def _open(self) -> None:
        """Begin a call, with all that has no answer."""
        self._outgoing.put(None)  # the thread that reads the queue of the call before ends
        self._outgoing = queue.SimpleQueue()
        for request in self._unanswered:
            self._outgoing.put(request)
        self._call = self._rpc(iter(self._outgoing.get, None), metadata=self._session.metadata)

    def _check_instance(self, timeout: float) -> None:
        now = self._client.session_info(timeout=timeout).instance_id
        if self._instance_id not in ("", now):
            raise ServerRestartedError(f"server {self._instance_id} is gone, {now} answers")
