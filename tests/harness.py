"""A real server in this process, and a hand on its device."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import torch
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_status import rpc_status
from transformers import AutoTokenizer, Qwen3ForCausalLM

from decodestep.accel.source import DEMO_FOLDER
from decodestep.service.options import ServeOptions
from decodestep.service.server import Server
from decodestep.v1 import sampling_pb2, step_pb2
from decodestep.v1.service_pb2_grpc import DecodeStepServiceStub
from decodestep.v1.tokenizer_pb2_grpc import TokenizerServiceStub

WAIT = 30.0  # seconds until a test that hangs fails

DecodeRow = step_pb2.DecodeRow
PrefillRow = step_pb2.PrefillRow
ReleaseRow = step_pb2.ReleaseRow
SamplingParams = sampling_pb2.SamplingParams
StepRequest = step_pb2.StepRequest
SAMPLED = step_pb2.ROW_OUTCOME_SAMPLED
APPENDED = step_pb2.ROW_OUTCOME_APPENDED
SKIPPED = step_pb2.ROW_OUTCOME_SKIPPED_FINISHED
FAILED = step_pb2.ROW_OUTCOME_FAILED


class Device:
    """Notes how many tokens each forward of a model has, and holds the device before a forward."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.forwards: list[int] = []
        self._changed = threading.Condition()
        self._permits: int | None = None  # None: as many as come
        self._is_waiting = False
        model.register_forward_pre_hook(self._before)

    def hold(self) -> None:
        """Stop before the next forward."""
        with self._changed:
            self._permits = 0

    def wait_held(self) -> None:
        """Return when the device is about to run a forward and may not."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_waiting, WAIT), "the device has nothing to run"

    def let_one(self) -> None:
        """Run one forward, then hold again."""
        with self._changed:
            self._permits = (self._permits or 0) + 1
            self._is_waiting = False
            self._changed.notify_all()

    def let_go(self) -> None:
        """Run whatever comes."""
        with self._changed:
            self._permits = None
            self._changed.notify_all()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold for a while."""
        self.hold()
        try:
            yield
        finally:
            self.let_go()

    def _before(self, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        with self._changed:
            while self._permits == 0:
                self._is_waiting = True
                self._changed.notify_all()
                assert self._changed.wait(2 * WAIT), "the test forgot to let the device go"
            self._is_waiting = False
            if self._permits is not None:
                self._permits -= 1
            self.forwards.append(len(inputs[0]))


class Running:
    """A server with the demo model in float32, listening on a Unix socket in `folder`."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.address = f"unix:{folder}/socket"
        defaults = {"listen": (self.address,), "dtype": "float32", "num_blocks": 256, "threads": 1}
        self.options = ServeOptions(**defaults | options)
        self.lines: list[str] = []
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="server")
        self._thread.start()
        self._ready.wait(WAIT)
        if self._failure is not None:
            raise self._failure
        self.address = self.addresses[0]
        self.channel = grpc.insecure_channel(self.address)
        self.stub = DecodeStepServiceStub(self.channel)
        self.tokenizer = TokenizerServiceStub(self.channel)
        self.health = HealthStub(self.channel)

    def __enter__(self) -> Running:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the server and wait until it has."""
        self.channel.close()
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT)
        assert not self._thread.is_alive(), "the server does not stop"
        if self._failure is not None:
            raise self._failure

    @property
    def executor(self) -> Any:
        """The device side of it."""
        return self.server._service.loaded.engine.executor

    @property
    def free_blocks(self) -> int:
        """KV blocks that nobody holds."""
        return int(self.executor.table.allocator.num_free)

    def stream(self, session: str | None = None) -> Stream:
        """A Step stream."""
        return Stream(self.stub, session)

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
        self._ready.set()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.server = Server(self.options, self.lines.append)
        self.addresses = await self.server.start()
        try:
            await self.server.wait_loaded()
            self.device = Device(self.executor.model.model)
            self._ready.set()
            await self._stop.wait()
        finally:
            await self.server.stop()


class Stream:
    """A Step stream, message by message."""

    def __init__(self, stub: DecodeStepServiceStub, session: str | None) -> None:
        self._sent: list[StepRequest] = []
        self._has_ended = False
        self._changed = threading.Condition()
        self.call = stub.Step(self._messages(), metadata=in_session(session), timeout=2 * WAIT)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def send(self, *requests: StepRequest) -> None:
        """Send messages."""
        with self._changed:
            self._sent += requests
            self._changed.notify()

    def receive(self) -> step_pb2.StepResponse:
        """The next answer."""
        response: step_pb2.StepResponse = next(self.call)
        return response

    def ask(self, **fields: Any) -> step_pb2.StepResponse:
        """Send a message and receive its answer."""
        self.send(StepRequest(**fields))
        return self.receive()

    def end(self) -> None:
        """Send nothing more."""
        with self._changed:
            self._has_ended = True
            self._changed.notify()

    def cancel(self) -> None:
        """Drop the stream."""
        self.end()
        self.call.cancel()

    def _messages(self) -> Iterator[StepRequest]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._sent or self._has_ended)
                if not self._sent:
                    return
                request = self._sent.pop(0)
            yield request


def in_session(name: str | None) -> tuple[tuple[str, str], ...]:
    """Metadata that names a session."""
    return () if name is None else (("decodestep-session", name),)


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    waited = threading.Event()
    for _ in range(int(WAIT / 0.01)):
        if condition():
            return
        waited.wait(0.01)
    raise AssertionError("it never came to be")


def reason_of(error: grpc.RpcError | status_pb2.Status) -> str:
    """The ErrorInfo reason of a failed call or row."""
    return details_of(error, error_details_pb2.ErrorInfo()).reason


def fields_of(error: grpc.RpcError | status_pb2.Status) -> list[str]:
    """The fields that an error complains of."""
    found = details_of(error, error_details_pb2.BadRequest())
    return [violation.field for violation in found.field_violations]


def details_of(error: grpc.RpcError | status_pb2.Status, kind: Message) -> Any:
    """One kind of detail of an error; an empty one if there is none."""
    status = rpc_status.from_call(error) if isinstance(error, grpc.RpcError) else error
    assert status is not None, error
    for detail in status.details:
        if detail.Is(kind.DESCRIPTOR):
            detail.Unpack(kind)
    return kind


def code_of(error: status_pb2.Status) -> str:
    """Name of the code of a row's or message's error."""
    return code_pb2.Code.Name(error.code)


def tokens_of(row: step_pb2.RowResult) -> list[int]:
    """What a row sampled."""
    return [token.token_id for token in row.tokens]


@cache
def reference() -> Qwen3ForCausalLM:
    """The demo model in transformers."""
    return Qwen3ForCausalLM.from_pretrained(DEMO_FOLDER, dtype=torch.float32)


@cache
def encode(text: str) -> tuple[int, ...]:
    """Tokens of a text."""
    return tuple(AutoTokenizer.from_pretrained(DEMO_FOLDER).encode(text, add_special_tokens=False))


@cache
def greedy(prompt: Sequence[int], count: int) -> list[int]:
    """What transformers generates after a prompt, past end tokens."""
    tokens, past = [], None
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        for _ in range(count):
            out = reference()(ids, past_key_values=past, use_cache=True)
            past = out.past_key_values
            tokens.append(int(out.logits[0, -1].argmax()))
            ids = torch.tensor([[tokens[-1]]])
    return tokens
