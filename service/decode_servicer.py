"""DecodeStepService: each RPC in a few lines."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager
from typing import TypedDict, TypeVar

import grpc

from decodestep.service import responses
from decodestep.service.errors import Context, MessageError, abort, status_of
from decodestep.service.generate import Generation
from decodestep.service.info import server_info, session_info
from decodestep.service.messages import Report
from decodestep.service.service import Service, Submitted
from decodestep.service.sessions import Session
from decodestep.service.validation import Names
from decodestep.v1 import blocks_pb2, generate_pb2, info_pb2, step_pb2
from decodestep.v1.service_pb2_grpc import DecodeStepServiceServicer

T = TypeVar("T")

_PREFILL_NAMES = Names(prefills="rows")
_DECODE_NAMES = Names(decodes="rows")
_RELEASE_NAMES = Names(releases="sequence_ids[{}]")


class _Common(TypedDict):
    """What the answers of all unary calls have."""

    instance_id: str
    step_id: int | None
    from_record: bool
    free_blocks: int


class DecodeServicer(DecodeStepServiceServicer):
    """Turns RPCs into messages for the queue, and reports into answers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def Step(  # type: ignore[override]  # reads and writes through the context
        self, _: object, context: Context
    ) -> None:
        """One answer a message, in order, reading up to max_in_flight messages ahead of the answers."""
        try:
            with self._session(context) as session:
                self._service.sessions.open_stream(session)
                try:
                    await _Stream(self._service, session, context).run()
                finally:
                    session.has_stream = False
        except MessageError as error:
            await abort(context, error)

    async def Prefill(self, request: step_pb2.PrefillRequest, context: Context) -> step_pb2.PrefillResponse:
        """The prefill part of a message."""
        step = step_pb2.StepRequest(queue_timeout_ms=request.queue_timeout_ms, prefills=request.rows)
        submitted, report = await self._unary(request, step, "rows", context, _PREFILL_NAMES)
        return step_pb2.PrefillResponse(
            rows=map(responses.row_result, report.prefills),
            timing=responses.timing(report, time.perf_counter() - submitted.arrived),
            executions=map(responses.execution, report.executions),
            **self._common(request, submitted, report),
        )

    async def DecodeStep(
        self, request: step_pb2.DecodeStepRequest, context: Context
    ) -> step_pb2.DecodeStepResponse:
        """The decode part of a message."""
        step = step_pb2.StepRequest(
            queue_timeout_ms=request.queue_timeout_ms, no_merge=request.no_merge, decodes=request.rows
        )
        submitted, report = await self._unary(request, step, "rows", context, _DECODE_NAMES)
        return step_pb2.DecodeStepResponse(
            rows=map(responses.row_result, report.decodes),
            timing=responses.timing(report, time.perf_counter() - submitted.arrived),
            executions=map(responses.execution, report.executions),
            **self._common(request, submitted, report),
        )

    async def Release(self, request: step_pb2.ReleaseRequest, context: Context) -> step_pb2.ReleaseResponse:
        """The release part of a message."""
        rows = [step_pb2.ReleaseRow(sequence_id=sequence_id) for sequence_id in request.sequence_ids]
        if request.all:
            rows.append(step_pb2.ReleaseRow(all=True))
        step = step_pb2.StepRequest(releases=rows)
        submitted, report = await self._unary(request, step, "sequence_ids", context, _RELEASE_NAMES)
        return step_pb2.ReleaseResponse(
            results=map(responses.release_result, report.releases),
            **self._common(request, submitted, report),
        )

    async def Cancel(self, request: step_pb2.CancelRequest, context: Context) -> step_pb2.CancelResponse:
        """Acts at once, beside the queue."""

        async def cancel() -> int:
            _ = self._service.loaded
            session = self._service.sessions.get(self._service.session_key(context))
            return 0 if session is None else self._service.cancel(session, request.cancel)

        cancelled = await _or_abort(cancel(), context)
        return step_pb2.CancelResponse(instance_id=self._service.instance_id, cancelled=cancelled)

    async def GetServerInfo(
        self, request: info_pb2.GetServerInfoRequest, context: Context
    ) -> info_pb2.GetServerInfoResponse:
        """Answered without the device."""

        async def ask() -> info_pb2.GetServerInfoResponse:
            return server_info(self._service)

        return await _or_abort(ask(), context)

    async def GetSession(
        self, request: info_pb2.GetSessionRequest, context: Context
    ) -> info_pb2.GetSessionResponse:
        """Answered without the device."""

        async def ask() -> info_pb2.GetSessionResponse:
            _ = self._service.loaded
            return session_info(self._service, self._service.session_key(context))

        return await _or_abort(ask(), context)

    async def Generate(
        self, request: generate_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generate_pb2.GenerateResponse]:
        """Prefill and decode messages in a session of its own."""
        try:
            generation = await Generation.start(self._service, request)
            try:
                async for piece in generation.run():
                    yield piece
            finally:
                generation.close()
        except MessageError as error:
            await abort(context, error)

    async def Fork(self, request: step_pb2.ForkRequest, context: Context) -> step_pb2.ForkResponse:
        """Not served yet."""
        raise await _unserved(context, "Fork")

    async def AllocateBlocks(
        self, request: blocks_pb2.AllocateBlocksRequest, context: Context
    ) -> blocks_pb2.AllocateBlocksResponse:
        """Not served yet."""
        raise await _unserved(context, "AllocateBlocks")

    async def FreeBlocks(
        self, request: blocks_pb2.FreeBlocksRequest, context: Context
    ) -> blocks_pb2.FreeBlocksResponse:
        """Not served yet."""
        raise await _unserved(context, "FreeBlocks")

    async def CopyBlocks(
        self, request: blocks_pb2.CopyBlocksRequest, context: Context
    ) -> blocks_pb2.CopyBlocksResponse:
        """Not served yet."""
        raise await _unserved(context, "CopyBlocks")

    async def ExportSequence(
        self, request: blocks_pb2.ExportSequenceRequest, context: Context
    ) -> AsyncIterator[blocks_pb2.ExportSequenceResponse]:
        """Not served yet."""
        raise await _unserved(context, "ExportSequence")
        yield  # makes it the generator that the contract asks for

    async def ImportSequence(self, _: object, context: Context) -> blocks_pb2.ImportSequenceResponse:
        """Not served yet."""
        raise await _unserved(context, "ImportSequence")

    @contextmanager
    def _session(self, context: Context) -> Iterator[Session]:
        _ = self._service.loaded
        session = self._service.sessions.enter(self._service.session_key(context))
        try:
            yield session
        finally:
            self._service.sessions.leave(session)

    async def _unary(
        self,
        request: step_pb2.PrefillRequest | step_pb2.DecodeStepRequest | step_pb2.ReleaseRequest,
        step: step_pb2.StepRequest,
        rows_field: str,
        context: Context,
        names: Names,
    ) -> tuple[Submitted, Report]:
        """Run one part of a message as a message of its own."""
        arrived = time.perf_counter()
        if request.HasField("step_id"):
            step.step_id = request.step_id

        async def run() -> tuple[Submitted, Report]:
            if not (step.prefills or step.decodes or step.releases):
                raise MessageError(
                    "INVALID_MESSAGE", "there is nothing to do", [(rows_field, "at least one")]
                )
            with self._session(context) as session:
                message = await self._service.parse(step, names)
                submitted = self._service.submit_request(session, message, step, True, arrived)
                try:
                    return submitted, await submitted.wait()
                except asyncio.CancelledError:
                    self._service.drop(session, [submitted])
                    raise

        return await _or_abort(run(), context)

    def _common(
        self,
        request: step_pb2.PrefillRequest | step_pb2.DecodeStepRequest | step_pb2.ReleaseRequest,
        submitted: Submitted,
        report: Report,
    ) -> _Common:
        return {
            "instance_id": self._service.instance_id,
            "step_id": request.step_id if request.HasField("step_id") else None,
            "from_record": submitted.from_record,
            "free_blocks": report.free_blocks,
        }


class _Stream:
    """One Step stream: a reader ahead of a writer."""

    def __init__(self, service: Service, session: Session, context: Context) -> None:
        self._service = service
        self._session = session
        self._context = context
        self._room = asyncio.Semaphore(service.options.max_in_flight)
        self._answers: deque[tuple[int | None, Submitted | MessageError]] = deque()
        self._news = asyncio.Event()
        self._has_ended = False

    async def run(self) -> None:
        """Until the client has sent its last message and has all answers. If it goes, what waits goes too."""
        reader = asyncio.create_task(self._read())
        try:
            await self._write()
            await reader
        finally:
            reader.cancel()
            self._service.drop(
                self._session, [answer for _, answer in self._answers if isinstance(answer, Submitted)]
            )

    async def _read(self) -> None:
        try:
            while True:
                await self._room.acquire()
                request = await self._context.read()
                if request is grpc.aio.EOF:  # type: ignore[attr-defined]  # not in the stubs
                    return
                arrived = time.perf_counter()
                step_id = request.step_id if request.HasField("step_id") else None
                answer: Submitted | MessageError
                try:
                    if request.HasField("cancel"):
                        self._service.cancel(self._session, request.cancel)
                    message = await self._service.parse(request)
                    answer = self._service.submit_request(self._session, message, request, False, arrived)
                except MessageError as error:
                    answer = error
                self._answers.append((step_id, answer))
                self._news.set()
        finally:
            self._has_ended = True
            self._news.set()

    async def _write(self) -> None:
        while True:
            while not self._answers:
                if self._has_ended:
                    return
                self._news.clear()
                await self._news.wait()
            step_id, answer = self._answers[0]
            response = await self._response(step_id, answer)
            self._answers.popleft()
            self._room.release()
            await self._context.write(response)

    async def _response(self, step_id: int | None, answer: Submitted | MessageError) -> step_pb2.StepResponse:
        if isinstance(answer, Submitted):
            try:
                report = await answer.wait()
            except MessageError as error:
                answer = error
            else:
                return step_pb2.StepResponse(
                    instance_id=self._service.instance_id,
                    step_id=step_id,
                    from_record=answer.from_record,
                    releases=map(responses.release_result, report.releases),
                    prefills=map(responses.row_result, report.prefills),
                    decodes=map(responses.row_result, report.decodes),
                    free_blocks=report.free_blocks,
                    timing=responses.timing(report, time.perf_counter() - answer.arrived),
                    executions=map(responses.execution, report.executions),
                )
        return step_pb2.StepResponse(
            instance_id=self._service.instance_id,
            step_id=step_id,
            error=status_of(answer),
            free_blocks=self._service.free_blocks,
        )


async def _or_abort(work: Awaitable[T], context: Context) -> T:
    """The result of `work`; its MessageError becomes the RPC's status."""
    try:
        return await work
    except MessageError as error:
        await abort(context, error)
        raise


async def _unserved(context: Context, name: str) -> MessageError:
    error = MessageError("NOT_SERVED_YET", f"{name} is not served")
    await abort(context, error)
    return error
