"""A client for asyncio: the same calls as Client, awaited."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import grpc
import grpc.aio

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


class AsyncClient:
    """As Client, for one event loop."""

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
            self._channel = grpc.aio.insecure_channel(target, CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(target, credentials, CHANNEL_OPTIONS)
        # The stubs serve both kinds of channel.
        self._stub: Any = service_pb2_grpc.DecodeStepServiceStub(self._channel)
        self._tokenizer: Any = tokenizer_pb2_grpc.TokenizerServiceStub(self._channel)
        self._session = SessionName(session)
        self.timeout = timeout

    @property
    def session(self) -> str:
        """The session's name."""
        return self._session.name

    async def __aenter__(self) -> AsyncClient:
        """Nothing to do: the channel connects by itself."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        await self.close()

    async def close(self) -> None:
        """Release what a session of one's own holds, and end all calls."""
        if self._session.is_own:
            with contextlib.suppress(ServiceError):
                await self.release(all=True, timeout=1)
        await self._channel.close(None)

    async def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """What the server is, holds and allows. Waits until it has started and loaded its model."""
        request = info_pb2.GetServerInfoRequest()
        return _wire.server_info(await self._call(self._stub.GetServerInfo, request, timeout))

    async def session_info(self, *, timeout: float | None = None) -> SessionInfo:
        """The sequences of the session."""
        request = info_pb2.GetSessionRequest()
        return _wire.session_info(await self._call(self._stub.GetSession, request, timeout))

    async def prefill(
        self, rows: Iterable[PrefillRow], *, queue_timeout: float | None = None, timeout: float | None = None
    ) -> StepResult:
        """Append prompts and sample the first token of each."""
        request = step_pb2.PrefillRequest(
            step_id=self._session.next_step_id(),
            queue_timeout_ms=_wire.milliseconds(queue_timeout),
            rows=map(_wire.prefill_row, rows),
        )
        return _wire.step_result(await self._call(self._stub.Prefill, request, timeout))

    async def decode(
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
        return _wire.step_result(await self._call(self._stub.DecodeStep, request, timeout))

    async def release(
        self, sequence_ids: Iterable[int] = (), *, all: bool = False, timeout: float | None = None
    ) -> StepResult:
        """End sequences and free their blocks."""
        request = step_pb2.ReleaseRequest(
            step_id=self._session.next_step_id(), sequence_ids=sequence_ids, all=all
        )
        return _wire.step_result(await self._call(self._stub.Release, request, timeout))

    async def cancel(
        self,
        sequence_ids: Iterable[int] = (),
        *,
        step_ids: Iterable[int] = (),
        timeout: float | None = None,
    ) -> int:
        """Stop work that waits, or a prompt under way. Returns how many rows and messages were told."""
        cancellation = step_pb2.Cancellation(sequence_ids=sequence_ids, step_ids=step_ids)
        request = step_pb2.CancelRequest(cancel=cancellation)
        response: step_pb2.CancelResponse = await self._call(self._stub.Cancel, request, timeout)
        return response.cancelled

    async def tokenize(
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
        return list((await self._call(self._tokenizer.Tokenize, request, timeout)).token_ids)

    async def detokenize(
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
        response = await self._call(self._tokenizer.Detokenize, request, timeout)
        return response.text, response.consumed

    async def generate(
        self,
        text: str = "",
        *,
        token_ids: Sequence[int] = (),
        messages: Sequence[Message] = (),
        sampling: SamplingParams | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[Piece]:
        """Continue a prompt, piece by piece. Closing the iterator cancels. Never sent again by itself."""
        request = _wire.generate_request(text, token_ids, messages, sampling)
        call = self._stub.Generate(request, timeout=timeout, metadata=self._session.metadata)
        try:
            async for response in call:
                yield _wire.piece(response)
        except grpc.RpcError as error:
            raise _wire.error_of(error) from error
        finally:
            call.cancel()

    def step_stream(self) -> AsyncStepStream:
        """Open a Step stream. A session has one at a time."""
        return AsyncStepStream(self, self._stub.Step, self._session)

    async def _call(self, rpc: Callable[..., Awaitable[T]], request: object, timeout: float | None) -> T:
        retry = Retry(self.timeout if timeout is None else timeout)
        while True:
            try:
                return await rpc(request, timeout=retry.remaining, metadata=self._session.metadata)
            except grpc.RpcError as error:
                delay = retry.delay_after(_wire.error_of(error))
            await asyncio.sleep(delay)


class AsyncStepStream:
    """As StepStream. One task may send while another receives."""

    def __init__(self, client: AsyncClient, rpc: Callable[..., Any], session: SessionName) -> None:
        self._client = client
        self._session = session
        self._rpc = rpc
        self._unanswered: deque[step_pb2.StepRequest] = deque()
        self._call = rpc(metadata=session.metadata)
        self._instance_id = ""

    async def __aenter__(self) -> AsyncStepStream:
        """Open already."""
        return self

    async def __aexit__(
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

    async def send(self, step: Step) -> int:
        """Send a step; waits only where the server reads no further ahead. Returns its step id."""
        request = _wire.step_request(step, self._session.next_step_id())
        self._unanswered.append(request)
        await self._write(request)
        return request.step_id

    async def receive(self, timeout: float | None = None) -> StepResult:
        """As StepStream.receive."""
        if not self._unanswered:
            raise ValueError("nothing is in flight: send a step first")
        try:
            response = await asyncio.wait_for(self._receive(), timeout)
        except TimeoutError:
            await self._open()  # giving up a read ends the call
            raise ServiceError("DEADLINE_EXCEEDED", f"no answer within {timeout} s") from None
        self._unanswered.popleft()
        self._instance_id = response.instance_id
        return _wire.step_result(response)

    def close(self) -> None:
        """End the stream; steps that have not run do not."""
        self._call.cancel()

    async def _receive(self) -> step_pb2.StepResponse:
        retry = Retry(self._client.timeout)
        while True:
            try:
                response = await self._call.read()
                if isinstance(response, step_pb2.StepResponse):
                    return response
                failure = ServiceError("UNAVAILABLE", "the server ended the stream")
            except grpc.RpcError as error:
                failure = _wire.error_of(error)
            await asyncio.sleep(retry.delay_after(failure, also="SESSION_HAS_STREAM"))
            now = (await self._client.session_info(timeout=retry.remaining)).instance_id
            if self._instance_id not in ("", now):
                raise ServerRestartedError(f"server {self._instance_id} is gone, {now} answers")
            await self._open()

    async def _open(self) -> None:
        """Begin a call, with all that has no answer."""
        self._call.cancel()
        self._call = self._rpc(metadata=self._session.metadata)
        for request in list(self._unanswered):
            await self._write(request)

    async def _write(self, request: step_pb2.StepRequest) -> None:
        # A call that has ended is opened anew by `receive`, with this request.
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            await self._call.write(request)
