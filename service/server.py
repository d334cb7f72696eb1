"""A server in this process: listeners, health, reflection, the device's thread, start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import stat
import sys
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

from decodestep.accel.errors import AccelError
from decodestep.accel.loader import Engine, Settings, load
from decodestep.service.addresses import Address
from decodestep.service.decode_servicer import DecodeServicer
from decodestep.service.device_thread import DeviceThread
from decodestep.service.errors import MessageError
from decodestep.service.options import ServeOptions
from decodestep.service.service import Loaded, Service
from decodestep.service.step_queue import StepQueue
from decodestep.service.tokenizer import Tokenizer
from decodestep.service.tokenizer_servicer import TokenizerServicer
from decodestep.service.validation import Bounds
from decodestep.v1 import service_pb2, tokenizer_pb2
from decodestep.v1.service_pb2_grpc import add_DecodeStepServiceServicer_to_server
from decodestep.v1.tokenizer_pb2_grpc import add_TokenizerServiceServicer_to_server

_DECODE_STEP = service_pb2.DESCRIPTOR.services_by_name["DecodeStepService"].full_name
_TOKENIZER = tokenizer_pb2.DESCRIPTOR.services_by_name["TokenizerService"].full_name
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
_CHECKED = ("", _DECODE_STEP, _TOKENIZER)  # what health speaks of
# The thread of the device and the event loop share the interpreter. A loop that waits 5 ms, the default, for
# its turn would delay answers by as much.
_SWITCH_INTERVAL = 0.0005
_GRACE = 5.0  # seconds that RPCs get to end by themselves when the server stops

Health = health_pb2.HealthCheckResponse


class ListenError(Exception):
    """An address cannot be listened on. Says which and why."""


class Server:
    """Serves one model. Use it from one event loop: start, wait_loaded, stop."""

    def __init__(self, options: ServeOptions, report: Callable[[str], None]) -> None:
        """`report` gets lines for people."""
        self.device_failed = asyncio.Event()
        self._options = options
        self._report = report
        self._service = Service(options)
        self._health = HealthServicer()
        self._addresses: list[Address] = []
        self._is_stopping = False
        self._queue: StepQueue | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> list[str]:
        """Listen, and begin to load. Returns the addresses, with the ports that were taken.

        Raises ListenError, and OptionError for an address that is none.
        """
        sys.setswitchinterval(_SWITCH_INTERVAL)
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[None] = self._loop.create_future()
        self._server = self._make_server()
        for service in _CHECKED:
            await self._health.set(service, Health.NOT_SERVING)
        for address in self._options.addresses:
            self._addresses.append(self._listen(address))
        await self._server.start()
        self._thread = DeviceThread(
            self._load, self._make_queue, self._on_loaded, self._on_broken, self._loop
        )
        self._thread.start()
        self._spawn(self._service.sessions.run_expiry())
        return [str(address) for address in self._addresses]

    async def wait_loaded(self) -> None:
        """Return when steps are served. Raises AccelError if the model cannot be."""
        await asyncio.shield(self._loaded)

    async def stop(self) -> None:
        """Take no more work, finish the step that runs, answer everything, close."""
        self._is_stopping = True
        await self._health.enter_graceful_shutdown()
        error = MessageError("SHUTTING_DOWN", "the server is shutting down")
        if self._queue is not None:
            for entry in self._queue.close(error):
                if not entry.future.done():
                    entry.future.set_exception(error)
        self._service.refuse(error.reason, error.message)
        await asyncio.to_thread(self._thread.join)
        await self._server.stop(_GRACE)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for address in self._addresses:
            if address.is_unix:
                Path(address.path).unlink(missing_ok=True)

    def _make_server(self) -> grpc.aio.Server:
        size = self._options.max_message_size
        server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),  # a second server on the port must fail, not share it
                ("grpc.max_receive_message_length", size),
                ("grpc.max_send_message_length", size),
                # Clients may ask every 10 s, also between calls, whether the connection lives.
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
                ("grpc.keepalive_permit_without_calls", 1),
            ]
        )
        add_DecodeStepServiceServicer_to_server(DecodeServicer(self._service), server)
        add_TokenizerServiceServicer_to_server(TokenizerServicer(self._service), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (_DECODE_STEP, _TOKENIZER, _HEALTH, reflection.SERVICE_NAME, _REFLECTION_V1)
        reflection.enable_server_reflection(names, server)
        server.add_generic_rpc_handlers((_reflection_v1(names),))
        return server

    def _listen(self, address: Address) -> Address:
        """Bind. Returns the address with the port that was taken."""
        if address.is_unix:
            _clear_socket(Path(address.path))
        try:
            if self._options.tls_cert is not None and not address.is_unix:
                port = self._server.add_secure_port(str(address), self._credentials())
            else:
                port = self._server.add_insecure_port(str(address))
        except RuntimeError as error:
            raise ListenError(f"cannot listen on {address}: {_reason(address)}") from error
        return address if address.is_unix else Address(host=address.host, port=port)

    def _credentials(self) -> grpc.ServerCredentials:
        options = self._options
        try:
            certificate = options.tls_cert.read_bytes() if options.tls_cert else b""
            key = options.tls_key.read_bytes() if options.tls_key else b""
            authority = options.tls_client_ca.read_bytes() if options.tls_client_ca else None
        except OSError as error:
            raise ListenError(f"cannot read {error.filename}: {error.strerror}") from error
        return grpc.ssl_server_credentials(
            [(key, certificate)], root_certificates=authority, require_client_auth=authority is not None
        )

    # On the device's thread.

    def _load(self) -> Engine:
        options = self._options
        settings = Settings(
            model=options.model,
            device=options.device,
            dtype=options.dtype,
            threads=options.threads,
            kv_cache_memory=options.kv_cache_memory,
            num_blocks=options.num_blocks,
            block_size=options.block_size,
            max_sequences=options.max_sequences,
            max_context=options.max_context,
            max_rows=options.max_rows,
            max_prefill_tokens=options.max_prefill_tokens,
        )
        engine = load(settings, self._report_from_thread, lambda: self._is_stopping)
        self._tokenizer = Tokenizer.load(engine.folder)
        return engine

    def _report_from_thread(self, line: str) -> None:
        self._loop.call_soon_threadsafe(self._report, line)

    def _make_queue(self, engine: Engine) -> StepQueue:
        self._queue = StepQueue(self._options.max_queue, engine.executor.max_rows)
        return self._queue

    # On the event loop.

    def _on_loaded(self, result: Engine | AccelError) -> None:
        if isinstance(result, AccelError):
            self._loaded.set_exception(result)
            self._loaded.exception()  # whoever waits sees it; if nobody does, that is no mistake
            return
        if self._queue is None:
            return
        if self._is_stopping:
            self._queue.close(MessageError("SHUTTING_DOWN", "the server is shutting down"))
            return
        config = result.config
        bounds = Bounds(config.vocab_size, config.max_position_embeddings, self._options.max_rows)
        self._service.open(Loaded(result, self._queue, self._tokenizer, bounds))
        self._spawn(self._set_health(Health.SERVING, self._loaded))

    def _on_broken(self) -> None:
        self._service.refuse("DEVICE_BROKEN", "the device has failed")
        self._spawn(self._set_health(Health.NOT_SERVING))
        self.device_failed.set()

    async def _set_health(self, status: int, then: asyncio.Future[None] | None = None) -> None:
        for service in _CHECKED:
            await self._health.set(service, status)
        if then is not None:
            then.set_result(None)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _reflection_v1(names: Iterable[str]) -> grpc.GenericRpcHandler[Any, Any]:
    """Reflection v1: the same messages as v1alpha under another service name."""
    handler = grpc.stream_stream_rpc_method_handler(
        ReflectionServicer(names).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(_REFLECTION_V1, {"ServerReflectionInfo": handler})


def _clear_socket(path: Path) -> None:
    """Remove a socket that nobody listens on any more. Raises ListenError where somebody does."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise ListenError(f"cannot listen on unix:{path}: there is no folder {path.parent}") from None
        return
    if not stat.S_ISSOCK(mode):
        raise ListenError(f"cannot listen on unix:{path}: something else than a socket is there")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            return
        except OSError as error:
            raise ListenError(f"cannot listen on unix:{path}: {error.strerror}") from error
    raise ListenError(f"cannot listen on unix:{path}: another process listens there")


def _reason(address: Address) -> str:
    """Why binding failed, which gRPC says only in its log."""
    if address.is_unix:
        return "the folder cannot be written to"
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, where in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(where)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return "see the log"
