"""What is refused of a whole message, what is not served yet, Generate, Tokenize and Detokenize."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from harness import (
    DecodeRow,
    PrefillRow,
    ReleaseRow,
    Running,
    SamplingParams,
    code_of,
    encode,
    eventually,
    fields_of,
    greedy,
    in_session,
    reason_of,
)

from decodestep.accel.source import DEMO_FOLDER
from decodestep.v1 import blocks_pb2, generate_pb2, info_pb2, step_pb2, tokenizer_pb2

TEXT = "It was a bright cold day"
PROMPT = list(encode(TEXT))


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ({"prefills": [PrefillRow(sequence_id=i, token_ids=[1]) for i in range(65)]}, ["prefills"]),
        ({"decodes": [DecodeRow(sequence_id=i) for i in range(65)]}, ["decodes"]),
        (
            {"prefills": [PrefillRow(sequence_id=4, token_ids=[1])] * 2},
            ["prefills[1].sequence_id"],
        ),
        ({"decodes": [DecodeRow(sequence_id=4), DecodeRow(sequence_id=4)]}, ["decodes[1].sequence_id"]),
        (
            {"prefills": [PrefillRow(sequence_id=4, token_ids=[1])], "decodes": [DecodeRow(sequence_id=4)]},
            ["decodes[0].sequence_id"],
        ),
        (
            {"releases": [ReleaseRow(sequence_id=4), ReleaseRow(sequence_id=4)]},
            ["releases[1].sequence_id"],
        ),
        ({"releases": [ReleaseRow(all=True), ReleaseRow(sequence_id=4)]}, ["releases"]),
    ],
)
def test_a_message_that_contradicts_itself(
    server: Running, message: dict[str, Any], fields: list[str]
) -> None:
    with server.stream() as stream:
        answer = stream.ask(step_id=1, **message)
        assert (answer.error.code, reason_of(answer.error)) == (3, "INVALID_MESSAGE")
        assert fields_of(answer.error) == fields
        assert answer.step_id == 1
        assert not (answer.prefills or answer.decodes or answer.releases)
        # The id was not used up.
        assert not stream.ask(step_id=1, releases=[ReleaseRow(sequence_id=9)]).HasField("error")
    assert server.device.forwards == []


def test_unary_calls_name_their_own_fields(server: Running) -> None:
    calls: list[tuple[Any, Any, list[str]]] = [
        (server.stub.Prefill, step_pb2.PrefillRequest(), ["rows"]),
        (server.stub.DecodeStep, step_pb2.DecodeStepRequest(), ["rows"]),
        (server.stub.Release, step_pb2.ReleaseRequest(), ["sequence_ids"]),
        (server.stub.Release, step_pb2.ReleaseRequest(sequence_ids=[3, 3]), ["sequence_ids[1]"]),
        (
            server.stub.DecodeStep,
            step_pb2.DecodeStepRequest(rows=[DecodeRow(sequence_id=1)] * 2),
            ["rows[1].sequence_id"],
        ),
    ]
    for call, request, fields in calls:
        with pytest.raises(grpc.RpcError) as failed:
            call(request)
        assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (reason_of(failed.value), fields_of(failed.value)) == ("INVALID_MESSAGE", fields)


def test_the_name_of_a_session_has_bounds(server: Running) -> None:
    for name in ("", "x" * 257):
        with pytest.raises(grpc.RpcError) as failed:
            server.stub.GetSession(info_pb2.GetSessionRequest(), metadata=in_session(name))
        assert fields_of(failed.value) == ["decodestep-session"]
    server.stub.GetSession(info_pb2.GetSessionRequest(), metadata=in_session("x" * 256))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("forks", [step_pb2.ForkRow(parent_sequence_id=1, child_sequence_id=2)]),
        ("block_frees", [1]),
        ("block_copies", [step_pb2.BlockCopy(source_block_id=1, target_block_id=2)]),
    ],
)
def test_parts_that_come_later(server: Running, name: str, value: list[Any]) -> None:
    with server.stream() as stream:
        answer = stream.ask(**{name: value})
    assert (code_of(answer.error), reason_of(answer.error)) == ("UNIMPLEMENTED", "NOT_SERVED_YET")
    assert fields_of(answer.error) == [name]


def test_calls_that_come_later(server: Running) -> None:
    stub = server.stub
    calls = [
        lambda: stub.Fork(step_pb2.ForkRequest()),
        lambda: stub.AllocateBlocks(blocks_pb2.AllocateBlocksRequest()),
        lambda: stub.FreeBlocks(blocks_pb2.FreeBlocksRequest()),
        lambda: stub.CopyBlocks(blocks_pb2.CopyBlocksRequest()),
        lambda: next(stub.ExportSequence(blocks_pb2.ExportSequenceRequest())),
        lambda: stub.ImportSequence(iter([blocks_pb2.ImportSequenceRequest()])),
    ]
    for call in calls:
        with pytest.raises(grpc.RpcError) as failed:
            call()
        assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert reason_of(failed.value) == "NOT_SERVED_YET"
        assert "is not served" in failed.value.details()


# Generate


def generate(server: Running, **fields: Any) -> list[generate_pb2.GenerateResponse]:
    return list(server.stub.Generate(generate_pb2.GenerateRequest(**fields), timeout=60))


def tokens(pieces: list[generate_pb2.GenerateResponse]) -> list[int]:
    return [token.token_id for piece in pieces for token in piece.tokens]


def test_generate_gives_tokens_and_text(server: Running) -> None:
    pieces = generate(server, text=TEXT, sampling=SamplingParams(max_tokens=20, ignore_eos=True))
    assert tokens(pieces) == greedy(tuple(PROMPT), 20)
    whole = server.tokenizer.Detokenize(
        tokenizer_pb2.DetokenizeRequest(token_ids=tokens(pieces), context_token_ids=PROMPT)
    )
    assert "".join(piece.text for piece in pieces) == whole.text
    assert pieces[0].num_prompt_tokens == len(PROMPT)
    assert pieces[0].HasField("seed")
    reasons = [piece.finish_reason for piece in pieces]
    assert reasons == [step_pb2.FINISH_REASON_UNSPECIFIED] * 19 + [step_pb2.FINISH_REASON_LENGTH]
    by_tokens = generate(server, token_ids=PROMPT, sampling=SamplingParams(max_tokens=20, ignore_eos=True))
    assert tokens(by_tokens) == tokens(pieces)
    assert len(tokens(generate(server, text=TEXT, sampling=SamplingParams(ignore_eos=True)))) == 64


@pytest.fixture
def talkative(start: Callable[..., Running], tmp_path: Path) -> Running:
    """A server whose model has a chat template."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO_FOLDER, folder)
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{{ suffix }}{% endif %}"
    )
    return start(model=str(folder))


def test_conversations(talkative: Running) -> None:
    conversation = [tokenizer_pb2.ChatMessage(role="user", content="Good morning.")]
    ask = talkative.tokenizer.Tokenize
    told = ask(tokenizer_pb2.TokenizeRequest(messages=conversation))
    assert told.rendered == "user: Good morning.\nassistant:"
    assert list(told.token_ids) == list(encode(told.rendered))
    few = SamplingParams(max_tokens=5, ignore_eos=True)
    by_messages = generate(talkative, messages=conversation, sampling=few)
    assert tokens(by_messages) == tokens(generate(talkative, token_ids=told.token_ids, sampling=few))
    assert by_messages[0].num_prompt_tokens == len(told.token_ids)
    request = tokenizer_pb2.TokenizeRequest(messages=conversation, add_generation_prompt=False)
    assert ask(request).rendered == "user: Good morning.\n"
    request = tokenizer_pb2.TokenizeRequest(messages=conversation, template_arguments={"suffix": "!"})
    assert ask(request).rendered.endswith("assistant:!")


def test_a_model_without_template_says_so(server: Running) -> None:
    conversation = [tokenizer_pb2.ChatMessage(role="user", content="Good morning.")]
    for call in (
        lambda: server.tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest(messages=conversation)),
        lambda: generate(server, messages=conversation),
    ):
        with pytest.raises(grpc.RpcError) as failed:
            call()
        assert failed.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert reason_of(failed.value) == "NO_CHAT_TEMPLATE"


@pytest.mark.parametrize(
    ("fields", "violated"),
    [
        ({}, ["text"]),
        ({"text": "a", "token_ids": [1]}, ["text"]),
        ({"token_ids": [1, 2**20]}, ["token_ids[1]"]),
        (
            {"text": "a", "sampling": SamplingParams(temperature=-1, top_p=2)},
            ["sampling.temperature", "sampling.top_p"],
        ),
    ],
)
def test_generate_refuses(server: Running, fields: dict[str, Any], violated: list[str]) -> None:
    with pytest.raises(grpc.RpcError) as failed:
        generate(server, **fields)
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert sorted(fields_of(failed.value)) == violated


def test_generate_says_when_the_prompt_is_too_long(server: Running) -> None:
    context = server.executor.table.context_length
    with pytest.raises(grpc.RpcError) as failed:
        generate(server, token_ids=[1] * (context + 1))
    assert (failed.value.code(), reason_of(failed.value)) == (
        grpc.StatusCode.OUT_OF_RANGE,
        "CONTEXT_EXCEEDED",
    )


def test_a_generation_that_is_cancelled_gives_its_blocks_back(server: Running) -> None:
    call = server.stub.Generate(
        generate_pb2.GenerateRequest(text=TEXT, sampling=SamplingParams(max_tokens=1000, ignore_eos=True))
    )
    next(call)
    call.cancel()
    eventually(lambda: server.free_blocks == server.executor.table.allocator.capacity)
    ran = len(server.device.forwards)
    assert ran < 1000


# Tokenizer


def test_text_and_tokens(server: Running) -> None:
    text = "Naïve café, 東京 🌦️ and more"
    told = server.tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest(text=text))
    assert list(told.token_ids) == list(encode(text))
    back = server.tokenizer.Detokenize(tokenizer_pb2.DetokenizeRequest(token_ids=told.token_ids))
    assert (back.text, back.consumed) == (text, len(told.token_ids))
    pieces, given, waiting = "", [], []
    for token in told.token_ids:
        waiting.append(token)
        answer = server.tokenizer.Detokenize(
            tokenizer_pb2.DetokenizeRequest(token_ids=waiting, context_token_ids=given, partial=True)
        )
        assert "\ufffd" not in answer.text
        pieces += answer.text
        given += waiting[: answer.consumed]
        waiting = waiting[answer.consumed :]
    assert pieces == text


@pytest.mark.parametrize(
    ("request_", "violated"),
    [
        (tokenizer_pb2.TokenizeRequest(), "text"),
        (
            tokenizer_pb2.TokenizeRequest(text="a", messages=[tokenizer_pb2.ChatMessage(role="user")]),
            "text",
        ),
        (tokenizer_pb2.DetokenizeRequest(token_ids=[1, 2**31]), "token_ids[1]"),
        (tokenizer_pb2.DetokenizeRequest(context_token_ids=[2**31]), "context_token_ids[0]"),
    ],
)
def test_the_tokenizer_refuses(server: Running, request_: Any, violated: str) -> None:
    is_text = isinstance(request_, tokenizer_pb2.TokenizeRequest)
    with pytest.raises(grpc.RpcError) as failed:
        (server.tokenizer.Tokenize if is_text else server.tokenizer.Detokenize)(request_)
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert fields_of(failed.value) == [violated]
