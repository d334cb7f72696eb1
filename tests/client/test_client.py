"""The Python client against a real server: both kinds, its Step stream, its scheduler, the demo."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Running, encode, greedy

from decodestep.client import (
    AsyncClient,
    Client,
    DecodeRow,
    FinishReason,
    Message,
    Outcome,
    PrefillRow,
    SamplingParams,
    ServiceError,
    Step,
)
from decodestep.client.scheduler import Request, Scheduler
from decodestep.client.text import TextStream

TEXTS = ["And God said, Let there be light:", "In the beginning", "The LORD is my shepherd", "Selah"]
PROMPTS = [encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client


def test_calls_give_plain_values(client: Client, server: Running) -> None:
    info = client.server_info()
    assert (info.model.name, info.model.dtype, info.kv_cache.num_blocks) == ("demo", "float32", 256)
    assert info.limits.max_rows == 64 and "torch" in info.device.versions
    result = client.prefill(
        [PrefillRow(1, PROMPTS[0], sampling=SamplingParams(logprobs=2)), PrefillRow(2, text=TEXTS[1])]
    )
    tokens = [row.token.token_id for row in result.prefills if row.token]
    assert tokens == [greedy(prompt, 1)[0] for prompt in PROMPTS[:2]]
    top = result.prefills[0].token.top_logprobs
    assert top[0].token_id == tokens[0] and top[0].logprob >= top[1].logprob
    row = client.decode([DecodeRow(1)]).decodes[0]
    assert (row.outcome, row.kv_length) == (Outcome.SAMPLED, len(PROMPTS[0]) + 1)
    session = client.session_info()
    assert [one.sequence_id for one in session.sequences] == [1, 2]
    assert client.release(all=True).free_blocks == 256
    failed = client.decode([DecodeRow(1)]).decodes[0]
    assert failed.error is not None and failed.error.reason == "SEQUENCE_NOT_FOUND"


def test_errors_name_reason_and_field(client: Client) -> None:
    with pytest.raises(ServiceError) as refused:
        client.prefill([])
    assert (refused.value.code, refused.value.reason) == ("INVALID_ARGUMENT", "INVALID_MESSAGE")
    assert refused.value.violations[0].field == "rows"
    with pytest.raises(ServiceError):
        next(client.generate("a", sampling=SamplingParams(top_p=2.0)))


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with Client(f"unix:{tmp_path}/none") as client, pytest.raises(ServiceError) as refused:
        client.server_info(timeout=0.5)
    assert refused.value.code in {"UNAVAILABLE", "DEADLINE_EXCEEDED"}


def test_text_there_and_back(client: Client) -> None:
    for text in (*TEXTS, "naïve 漢字 🙂"):
        tokens = client.tokenize(text)
        assert client.detokenize(tokens)[0] == text
        stream = TextStream(client)
        pieces = [stream.push([token]) for token in tokens]
        assert "".join(pieces) + stream.finish() == text
        assert not any("\ufffd" in piece for piece in pieces)


def test_generate(client: Client) -> None:
    pieces = list(client.generate(TEXTS[0], sampling=SamplingParams(max_tokens=8)))
    assert [token.token_id for piece in pieces for token in piece.tokens] == greedy(PROMPTS[0], 8)
    assert pieces[0].num_prompt_tokens == len(PROMPTS[0])
    assert pieces[-1].finish_reason is FinishReason.LENGTH


def test_closing_a_generation_frees_what_it_holds(client: Client, server: Running) -> None:
    pieces = client.generate(TEXTS[0], sampling=SamplingParams(max_tokens=500))
    next(pieces)
    pieces.close()
    for _ in range(500):
        if server.free_blocks == 256:
            break
        client.session_info()
    assert server.free_blocks == 256


def test_a_stream_that_breaks_steps_no_row_twice(client: Client, server: Running) -> None:
    """What was not answered is sent again; what had run is answered from the record."""
    want = greedy(PROMPTS[0], 12)
    with client.step_stream() as stream:
        stream.send(Step(prefills=[PrefillRow(1, PROMPTS[0])]))
        have = [stream.receive().prefills[0].token.token_id]
        for step in range(11):
            stream.send(Step(decodes=[DecodeRow(1)]))
            if step % 3 == 1:
                stream._call.cancel()  # the connection is lost, before or after the step has run
                with pytest.raises(ServiceError):
                    stream.receive()
                stream._open()
            have.append(stream.receive().decodes[0].token.token_id)
    assert have == want


def test_waiting_for_an_answer_has_an_end(client: Client, server: Running) -> None:
    with client.step_stream() as stream:
        with server.device.held():
            stream.send(Step(prefills=[PrefillRow(1, PROMPTS[0])]))
            with pytest.raises(ServiceError) as late:
                stream.receive(timeout=0.2)
            assert late.value.code == "DEADLINE_EXCEEDED"
        result = stream.receive()
    # The first one was dropped amid its prompt, which ends it, or ran to its end: either way once.
    assert result.prefills[0].outcome in {Outcome.SAMPLED, Outcome.FAILED}


def test_asyncio(server: Running) -> None:
    async def run() -> None:
        async with AsyncClient(server.address) as client:
            assert (await client.server_info()).model.name == "demo"
            tokens = await client.tokenize(TEXTS[0])
            assert tuple(tokens) == PROMPTS[0]
            async with client.step_stream() as stream:
                await stream.send(Step(prefills=[PrefillRow(1, tokens)]))
                for _ in range(5):
                    await stream.send(Step(decodes=[DecodeRow(1)]))
                rows = [(await stream.receive()).prefills[0]]
                rows += [(await stream.receive()).decodes[0] for _ in range(5)]
            assert [row.token.token_id for row in rows if row.token] == greedy(PROMPTS[0], 6)
            pieces = [piece async for piece in client.generate(TEXTS[1])]
            assert len(pieces) == 64
            with pytest.raises(ServiceError):
                await client.tokenize(messages=[Message("nobody", "x")], text="both")

    asyncio.run(run())


def test_the_scheduler_gives_each_prompt_what_it_has_alone(client: Client) -> None:
    """Prompts that come, go and are cancelled; chunks smaller than a prompt."""
    with Scheduler(client, prefill_tokens=5) as scheduler:
        requests = []
        for index in range(12):
            requests.append(scheduler.submit(PROMPTS[index % 4], SamplingParams(max_tokens=3 + 4 * index)))
            scheduler.step()
            if index == 6:
                scheduler.cancel(requests[3])
        scheduler.run()
    for index, request in enumerate(requests):
        want = greedy(PROMPTS[index % 4], 3 + 4 * index)
        if index == 3:
            assert request.is_cancelled and request.output == want[: len(request.output)]
        else:
            assert request.finish_reason in {FinishReason.LENGTH, FinishReason.END_TOKEN}
            assert request.output == want[: len(request.output)]
            assert len(request.output) == len(want) or request.finish_reason is FinishReason.END_TOKEN


def test_the_scheduler_preempts_and_recomputes(tmp_path: Path) -> None:
    """With too few blocks for all, every text comes out as it would have alone, seeded ones too."""

    def run(server: Running) -> list[list[int]]:
        with Client(server.address) as client, Scheduler(client) as scheduler:
            requests: list[Request] = [
                scheduler.submit(
                    prompt, SamplingParams(max_tokens=40, temperature=one % 2, seed=one, ignore_eos=True)
                )
                for one, prompt in enumerate(PROMPTS)
            ]
            scheduler.run()
            assert [request.error for request in requests] == [None] * 4
            return [request.output for request in requests]

    with Running(tmp_path, num_blocks=64, block_size=8) as server:
        want = run(server)
        most = max(server.device.forwards[-30:])
        assert most == 4  # all at once
    with Running(tmp_path, num_blocks=9, block_size=8) as server:
        assert run(server) == want


def test_a_prompt_that_can_never_fit_fails_alone(tmp_path: Path) -> None:
    with Running(tmp_path, num_blocks=4, block_size=8) as server, Client(server.address) as client:
        with Scheduler(client) as scheduler:
            big = scheduler.submit([5] * 100, SamplingParams(max_tokens=3))
            small = scheduler.submit(PROMPTS[0], SamplingParams(max_tokens=3))
            scheduler.run()
        assert big.error is not None and big.error.reason == "NO_FREE_BLOCKS"
        assert small.output == greedy(PROMPTS[0], 3)


def test_the_demo_reports_what_it_did(server: Running) -> None:
    command = [sys.executable, "-m", "decodestep.client.demo", "--target", server.address]
    ran = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=120, check=True)
    report = json.loads(ran.stdout)
    assert len(report["texts"]) == 12 and report["texts"][-1]["end"] == "CANCELLED"
    first = report["texts"][1]
    assert first["token_ids"] == greedy(encode(first["prompt"]), len(first["token_ids"]))
    assert set(report["latency_ms"]) == {"ttft", "tpot", "step", "queue", "host", "device"}
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "time to first token" in shown and "[cancelled]" in shown


def test_the_client_imports_neither_torch_nor_numpy() -> None:
    heavy = ("torch", "numpy", "transformers")
    code = f"import sys, decodestep.client; print([m for m in {heavy} if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
