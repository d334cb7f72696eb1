"""The server around the service: addresses, TLS, health, reflection, limits, the end."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from harness import DecodeRow, PrefillRow, Running, StepRequest, encode, eventually, in_session, reason_of

from decodestep.accel.loader import load
from decodestep.service import server as server_module
from decodestep.service.options import ServeOptions
from decodestep.service.server import ListenError, Server
from decodestep.v1 import generate_pb2, info_pb2, step_pb2
from decodestep.v1.service_pb2_grpc import DecodeStepServiceStub

PROMPT = list(encode("It was a bright cold day"))
GRPCURL = str(Path(sys.executable).with_name("grpcurl"))
SERVICES = ["", "decodestep.v1.DecodeStepService", "decodestep.v1.TokenizerService"]


def listen(**options: Any) -> None:
    """Start a server and stop it again. Raises what its start raises."""

    async def run() -> None:
        server = Server(ServeOptions(num_blocks=8, **options), lambda line: None)
        await server.start()
        await server.stop()

    asyncio.run(run())


# Addresses


def test_a_port_has_one_server(start: Callable[..., Running]) -> None:
    first = start(listen=("127.0.0.1:0",))
    with pytest.raises(ListenError, match=f"cannot listen on {first.address}: address already in use"):
        listen(listen=(first.address,))
    first.stub.GetServerInfo(info_pb2.GetServerInfoRequest())


def test_a_socket_is_not_stolen(server: Running) -> None:
    with pytest.raises(ListenError, match="another process listens there"):
        listen(listen=(server.address,))
    server.stub.GetServerInfo(info_pb2.GetServerInfoRequest())


def test_a_socket_that_nobody_listens_on_is_cleared(start: Callable[..., Running], tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "socket"))
    start(folder=tmp_path).stub.GetServerInfo(info_pb2.GetServerInfoRequest())


def test_nothing_else_is_removed_for_a_socket(tmp_path: Path) -> None:
    file = tmp_path / "socket"
    file.write_text("mine")
    with pytest.raises(ListenError, match="something else than a socket is there"):
        listen(listen=(f"unix:{file}",))
    assert file.read_text() == "mine"
    with pytest.raises(ListenError, match="there is no folder"):
        listen(listen=(f"unix:{tmp_path}/none/socket",))


def test_a_server_leaves_no_socket_behind(tmp_path: Path) -> None:
    listen(listen=(f"unix:{tmp_path}/socket",))
    assert list(tmp_path.iterdir()) == []


# TLS


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, trustme.CA]:
    """A folder with the server's certificate, its key and the authority's certificate; the authority."""
    folder, authority = tmp_path_factory.mktemp("tls"), trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    return folder, authority


def secure(address: str, folder: Path, who: trustme.LeafCert | None = None) -> DecodeStepServiceStub:
    key, chain = (who.private_key_pem.bytes(), who.cert_chain_pems[0].bytes()) if who else (None, None)
    credentials = grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes(), key, chain)
    return DecodeStepServiceStub(grpc.secure_channel(address, credentials))


def test_tls(start: Callable[..., Running], tls: tuple[Path, trustme.CA]) -> None:
    folder, _ = tls
    running = start(listen=("127.0.0.1:0",), tls_cert=folder / "cert.pem", tls_key=folder / "key.pem")
    secure(running.address, folder).GetServerInfo(info_pb2.GetServerInfoRequest(), timeout=30)
    with pytest.raises(grpc.RpcError) as failed:
        running.stub.GetServerInfo(info_pb2.GetServerInfoRequest(), timeout=30)
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE


def test_clients_with_certificates_have_sessions_of_their_own(
    start: Callable[..., Running], tls: tuple[Path, trustme.CA]
) -> None:
    folder, authority = tls
    running = start(
        listen=("127.0.0.1:0",),
        tls_cert=folder / "cert.pem",
        tls_key=folder / "key.pem",
        tls_client_ca=folder / "ca.pem",
    )
    one, other = (
        secure(running.address, folder, authority.issue_cert(name)) for name in ("one.test", "other.test")
    )
    request = step_pb2.PrefillRequest(rows=[PrefillRow(sequence_id=1, token_ids=PROMPT)])
    for stub in (one, other):  # the same session name and sequence id
        answer = stub.Prefill(request, metadata=in_session("work"), timeout=30)
        assert not answer.rows[0].HasField("error")
    one.Release(step_pb2.ReleaseRequest(all=True), metadata=in_session("work"))
    sessions = [
        stub.GetSession(info_pb2.GetSessionRequest(), metadata=in_session("work")) for stub in (one, other)
    ]
    assert [len(session.sequences) for session in sessions] == [0, 1]
    with pytest.raises(grpc.RpcError) as failed:
        secure(running.address, folder).GetServerInfo(info_pb2.GetServerInfoRequest(), timeout=30)
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE


# While it loads, and when it ends


def test_health_and_calls_while_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_load = threading.Event()

    def load_late(*arguments: Any) -> Any:
        assert may_load.wait(30)
        return load(*arguments)

    monkeypatch.setattr(server_module, "load", load_late)
    address = f"unix:{tmp_path}/socket"

    async def run() -> None:
        server = Server(ServeOptions(listen=(address,), num_blocks=8), lambda line: None)
        await server.start()
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                check = channel.unary_unary(
                    "/grpc.health.v1.Health/Check",
                    request_serializer=HealthCheckRequest.SerializeToString,
                    response_deserializer=HealthCheckResponse.FromString,
                )

                async def states() -> list[int]:
                    answers = [await check(HealthCheckRequest(service=name)) for name in SERVICES]
                    return [answer.status for answer in answers]

                assert await states() == [HealthCheckResponse.NOT_SERVING] * 3
                stub: Any = DecodeStepServiceStub(channel)
                for call in (
                    stub.GetServerInfo(info_pb2.GetServerInfoRequest()),
                    stub.DecodeStep(step_pb2.DecodeStepRequest(rows=[DecodeRow(sequence_id=1)])),
                ):
                    with pytest.raises(grpc.RpcError) as failed:
                        await call
                    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
                    assert "the model is loading" in str(failed.value.details())
                may_load.set()
                await server.wait_loaded()
                assert await states() == [HealthCheckResponse.SERVING] * 3
        finally:
            may_load.set()
            await server.stop()

    asyncio.run(run())


def test_the_end_answers_everything(start: Callable[..., Running]) -> None:
    running = start()
    with running.stream() as stream:
        first = stream.ask(prefills=[PrefillRow(sequence_id=1, token_ids=PROMPT)])
        assert not first.prefills[0].HasField("error")
        with running.device.held():
            stream.send(*[StepRequest(decodes=[DecodeRow(sequence_id=1)])] * 3)
            running.device.wait_held()
            eventually(lambda: running.server._queue._waiting == 2)
            ending = asyncio.run_coroutine_threadsafe(running.server.stop(), running.loop)
            eventually(lambda: running.server._is_stopping and running.server._service._loaded is None)
        answers = [stream.receive() for _ in range(3)]
        stream.end()
    assert not answers[0].decodes[0].HasField("error")  # it ran already
    assert [reason_of(answer.error) for answer in answers[1:]] == ["SHUTTING_DOWN"] * 2
    ending.result(30)


# Messages


def test_a_message_has_a_largest_size(start: Callable[..., Running]) -> None:
    running = start(max_message_size=2**16)
    request = step_pb2.PrefillRequest(rows=[PrefillRow(sequence_id=1, text="a" * 2**17)])
    with pytest.raises(grpc.RpcError) as failed:
        running.stub.Prefill(request)
    assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_messages_may_be_larger_than_grpc_allows_by_default(server: Running) -> None:
    request = step_pb2.PrefillRequest(rows=[PrefillRow(sequence_id=1, text="a" * 5 * 2**20)])
    answer = server.stub.Prefill(request)
    assert reason_of(answer.rows[0].error) == "CONTEXT_EXCEEDED"


# grpcurl


def grpcurl(address: str, *arguments: str) -> str:
    target = address.replace("unix:", "")
    options = ["-plaintext", "-unix"] if address.startswith("unix:") else ["-plaintext"]
    command = [GRPCURL, *options, *arguments[:-1], target, *arguments[-1].split()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_grpcurl_finds_and_calls_everything(server: Running) -> None:
    found = grpcurl(server.address, "list").split()
    assert set(found) == {
        "decodestep.v1.DecodeStepService",
        "decodestep.v1.TokenizerService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    shown = grpcurl(server.address, "describe decodestep.v1.PrefillRow")
    assert "repeated uint32 token_ids = 2" in shown
    row = json.dumps({"rows": [{"sequenceId": 7, "text": "It was a bright cold day"}]})
    answer = json.loads(grpcurl(server.address, "-d", row, "decodestep.v1.DecodeStepService/Prefill"))
    assert answer["rows"][0]["outcome"] == "ROW_OUTCOME_SAMPLED"
    assert answer["rows"][0]["kv_length"] == len(PROMPT)
    health = json.loads(grpcurl(server.address, "grpc.health.v1.Health/Check"))
    assert health == {"status": "SERVING"}


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_of_both_versions(server: Running, version: str) -> None:
    from grpc_reflection.v1alpha import reflection_pb2

    method = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
    call = server.channel.stream_stream(
        method,
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol="decodestep.v1.DecodeStepService")
    answer = next(call(iter([request])))
    assert answer.file_descriptor_response.file_descriptor_proto


def test_generate_through_grpcurl(server: Running) -> None:
    request = json.dumps({"text": "It was", "sampling": {"maxTokens": 3, "ignoreEos": True}})
    pieces = grpcurl(server.address, "-d", request, "decodestep.v1.DecodeStepService/Generate")
    want = server.stub.Generate(
        generate_pb2.GenerateRequest(text="It was", sampling={"max_tokens": 3, "ignore_eos": True})
    )
    assert pieces.count('"token_id"') == sum(len(piece.tokens) for piece in want) == 3
