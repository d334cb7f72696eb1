"""What a row says of its sequence is checked against what is, and a row that fails changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import (
    FAILED,
    SAMPLED,
    DecodeRow,
    PrefillRow,
    Running,
    SamplingParams,
    code_of,
    encode,
    fields_of,
    greedy,
    in_session,
    reason_of,
    tokens_of,
)

from decodestep.v1 import info_pb2, sampling_pb2, step_pb2

PROMPT = encode("And God said, Let there be light:")
END = len(PROMPT)


def prompt(sequence_id: int = 1, **fields: object) -> list[PrefillRow]:
    return [PrefillRow(**{"sequence_id": sequence_id, "token_ids": PROMPT} | fields)]


@pytest.mark.parametrize(
    ("row", "code", "reason"),
    [
        (PrefillRow(sequence_id=1, token_ids=[1]), "ALREADY_EXISTS", "SEQUENCE_EXISTS"),
        (PrefillRow(sequence_id=2, token_ids=[1], start_position=4), "NOT_FOUND", "SEQUENCE_NOT_FOUND"),
        (
            PrefillRow(sequence_id=1, token_ids=[1], start_position=END + 1),
            "FAILED_PRECONDITION",
            "KV_LENGTH_MISMATCH",
        ),
        (PrefillRow(sequence_id=2, token_ids=[1] * 2049), "OUT_OF_RANGE", "CONTEXT_EXCEEDED"),
        (DecodeRow(sequence_id=2), "NOT_FOUND", "SEQUENCE_NOT_FOUND"),
        (DecodeRow(sequence_id=1, kv_length=END - 1), "FAILED_PRECONDITION", "KV_LENGTH_MISMATCH"),
        (DecodeRow(sequence_id=1, token_id=1, truncate_to=END + 1), "OUT_OF_RANGE", "TRUNCATE_OUT_OF_RANGE"),
        (DecodeRow(sequence_id=1, truncate_to=END - 1), "FAILED_PRECONDITION", "NO_PENDING_TOKEN"),
    ],
)
def test_a_row_that_does_not_fit_its_sequence(
    server: Running, row: PrefillRow | DecodeRow, code: str, reason: str
) -> None:
    with server.stream("s") as stream:
        stream.ask(prefills=prompt())
        free = server.free_blocks
        part = "prefills" if isinstance(row, PrefillRow) else "decodes"
        (result,) = getattr(stream.ask(**{part: [row]}), part)
        assert (result.outcome, code_of(result.error), reason_of(result.error)) == (FAILED, code, reason)
        assert result.kv_length == (END if row.sequence_id == 1 else 0)
        assert server.free_blocks == free
        # With token and length the sequence goes on as if nothing had been.
        want = greedy(PROMPT, 2)
        (after,) = stream.ask(decodes=[DecodeRow(sequence_id=1, token_id=want[0], kv_length=END)]).decodes
        assert tokens_of(after) == want[1:]


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (PrefillRow(sequence_id=2), "token_ids"),
        (PrefillRow(sequence_id=2, token_ids=[1], text="a"), "token_ids"),
        (PrefillRow(sequence_id=2, token_ids=[1, 2**31]), "token_ids[1]"),
        (PrefillRow(sequence_id=2, token_ids=[1], num_output_tokens=2), "num_output_tokens"),
        (PrefillRow(sequence_id=2, token_ids=[1], allowed_token_bitmask=[1]), "allowed_token_bitmask"),
        (
            PrefillRow(sequence_id=2, token_ids=[1], sampling=SamplingParams(temperature=-1)),
            "sampling.temperature",
        ),
        (
            PrefillRow(sequence_id=2, token_ids=[1], sampling=SamplingParams(temperature=float("nan"))),
            "sampling.temperature",
        ),
        (PrefillRow(sequence_id=2, token_ids=[1], sampling=SamplingParams(top_p=0)), "sampling.top_p"),
        (PrefillRow(sequence_id=2, token_ids=[1], sampling=SamplingParams(min_p=1.5)), "sampling.min_p"),
        (
            PrefillRow(sequence_id=2, token_ids=[1], sampling=SamplingParams(repetition_penalty=0)),
            "sampling.repetition_penalty",
        ),
        (PrefillRow(sequence_id=2, token_ids=[1], sampling=SamplingParams(logprobs=65)), "sampling.logprobs"),
        (
            PrefillRow(sequence_id=2, token_ids=[1], sampling=SamplingParams(max_tokens=0)),
            "sampling.max_tokens",
        ),
        (
            PrefillRow(
                sequence_id=2,
                token_ids=[1],
                sampling=SamplingParams(logit_bias=[sampling_pb2.LogitBias(token_id=10**9)]),
            ),
            "sampling.logit_bias[0].token_id",
        ),
        (DecodeRow(sequence_id=1, token_id=10**9), "token_id"),
        (DecodeRow(sequence_id=1, allowed_token_bitmask=[1, 2]), "allowed_token_bitmask"),
    ],
)
def test_a_row_with_a_wrong_value_names_the_field(
    server: Running, row: PrefillRow | DecodeRow, field: str
) -> None:
    """It fails alone: its neighbour in the same message is sampled."""
    with server.stream("s") as stream:
        stream.ask(prefills=prompt(1))
        stream.ask(prefills=prompt(3))
        part = "prefills" if isinstance(row, PrefillRow) else "decodes"
        rows = {"prefills": [], "decodes": [DecodeRow(sequence_id=3)]}
        rows[part] = [row, *rows[part]]
        answer = stream.ask(**rows)
        bad = getattr(answer, part)[0]
        assert (code_of(bad.error), reason_of(bad.error)) == ("INVALID_ARGUMENT", "INVALID_ROW")
        assert fields_of(bad.error) == [f"{part}[0].{field}"]
        assert tokens_of(answer.decodes[-1]) == greedy(PROMPT, 2)[1:]


@pytest.mark.parametrize(
    "row",
    [
        PrefillRow(sequence_id=2, token_ids=[1], block_ids=[1]),
        PrefillRow(sequence_id=2, token_ids=[1], cached_tokens=1),
        DecodeRow(sequence_id=1, num_tokens=2),
        DecodeRow(sequence_id=1, draft_token_ids=[1]),
    ],
)
def test_what_comes_later_is_unimplemented(server: Running, row: PrefillRow | DecodeRow) -> None:
    with server.stream("s") as stream:
        stream.ask(prefills=prompt())
        part = "prefills" if isinstance(row, PrefillRow) else "decodes"
        (result,) = getattr(stream.ask(**{part: [row]}), part)
        assert (code_of(result.error), reason_of(result.error)) == ("UNIMPLEMENTED", "NOT_SERVED_YET")


def test_truncation_rewinds(server: Running) -> None:
    want = greedy(PROMPT, 6)
    with server.stream("s") as stream:
        stream.ask(prefills=prompt())
        for _ in range(5):
            stream.ask(decodes=[DecodeRow(sequence_id=1)])
        row = DecodeRow(sequence_id=1, token_id=want[1], truncate_to=END + 1)
        (result,) = stream.ask(decodes=[row]).decodes
        assert (tokens_of(result), result.kv_length) == (want[2:3], END + 2)


def test_a_sequence_that_is_recomputed_goes_on_the_same(server: Running) -> None:
    """num_output_tokens keeps penalties, minimum length and random stream."""
    params = SamplingParams(
        temperature=1.0, seed=11, presence_penalty=0.5, frequency_penalty=0.3, min_tokens=3, max_tokens=20
    )
    with server.stream("s") as stream:
        have = tokens_of(stream.ask(prefills=prompt(sampling=params)).prefills[0])
        for _ in range(19):
            result = stream.ask(decodes=[DecodeRow(sequence_id=1)]).decodes[0]
            have += tokens_of(result)
        assert result.finish_reason == step_pb2.FINISH_REASON_LENGTH
        for kept in (1, 7, 19):
            tokens = [*PROMPT, *have[:kept]]
            row = PrefillRow(sequence_id=9, token_ids=tokens, sampling=params, num_output_tokens=kept)
            again = tokens_of(stream.ask(prefills=[row]).prefills[0])
            while len(again) + kept < 20:
                result = stream.ask(decodes=[DecodeRow(sequence_id=9)]).decodes[0]
                again += tokens_of(result)
            assert again == have[kept:]
            stream.ask(releases=[step_pb2.ReleaseRow(sequence_id=9)])


def test_the_seed_is_told_once_and_reproduces(server: Running) -> None:
    with server.stream("s") as stream:
        params = SamplingParams(temperature=1.0)
        first = stream.ask(prefills=prompt(sampling=params)).prefills[0]
        second = stream.ask(decodes=[DecodeRow(sequence_id=1)]).decodes[0]
        assert first.HasField("seed") and not second.HasField("seed")
        params.seed = first.seed
        again = stream.ask(prefills=prompt(2, sampling=params)).prefills[0]
        assert again.seed == first.seed and tokens_of(again) == tokens_of(first)


def test_a_row_does_not_depend_on_its_neighbours(server: Running) -> None:
    """Greedy and seeded rows alike, whoever comes, goes or fails beside them."""
    texts = ["In the beginning", "The LORD is my shepherd", "Blessed are", "And Moses said", "Selah"]
    rows = [
        PrefillRow(
            sequence_id=one,
            token_ids=encode(text),
            sampling=SamplingParams(temperature=0.9 * (one % 2), seed=one, top_p=0.9, top_k=50),
        )
        for one, text in enumerate(texts)
    ]
    alone = []
    with server.stream("alone") as stream:
        for row in rows:
            have = tokens_of(stream.ask(prefills=[row]).prefills[0])
            for _ in range(30):
                (result,) = stream.ask(decodes=[DecodeRow(sequence_id=row.sequence_id)]).decodes
                have += tokens_of(result)
            alone.append(have)
    together: dict[int, list[int]] = {}
    with server.stream("together") as stream:
        for step in range(60):
            starting = [row for row in rows[::-1] if row.sequence_id * 4 == step]
            running = [one for one in reversed(together) if len(together[one]) < 31]
            bad = [DecodeRow(sequence_id=99)]
            decodes = [*(DecodeRow(sequence_id=one) for one in running), *bad]
            answer = stream.ask(prefills=starting, decodes=decodes)
            for result in (*answer.prefills, *answer.decodes[:-1]):
                together.setdefault(result.sequence_id, []).extend(tokens_of(result))
            assert reason_of(answer.decodes[-1].error) == "SEQUENCE_NOT_FOUND"
    assert [together[one] for one in range(5)] == alone


def test_blocks_are_reserved_in_row_order_or_the_row_fails(start: Callable[..., Running]) -> None:
    server = start(num_blocks=4, block_size=8)
    with server.stream("s") as stream:
        rows = [PrefillRow(sequence_id=one, token_ids=[5] * size) for one, size in enumerate((16, 24, 8))]
        answer = stream.ask(prefills=rows)
        assert [row.outcome for row in answer.prefills] == [SAMPLED, FAILED, SAMPLED]
        assert reason_of(answer.prefills[1].error) == "NO_FREE_BLOCKS" and answer.free_blocks == 1
        # Both want their next block, one is there.
        answer = stream.ask(decodes=[DecodeRow(sequence_id=2), DecodeRow(sequence_id=0)])
        assert [row.outcome for row in answer.decodes] == [SAMPLED, FAILED]
        assert answer.decodes[1].kv_length == 16 and answer.free_blocks == 0
        stream.ask(releases=[step_pb2.ReleaseRow(sequence_id=2)])
        token = tokens_of(stream.ask(decodes=[DecodeRow(sequence_id=0, token_id=7, kv_length=16)]).decodes[0])
        assert token == greedy((5,) * 16 + (7,), 1)


def test_a_sequence_ends_with_its_context(start: Callable[..., Running]) -> None:
    server = start(max_context=20)
    with server.stream("s") as stream:
        stream.ask(prefills=[PrefillRow(sequence_id=1, token_ids=[5] * 10)])
        for position in range(10):
            (row,) = stream.ask(decodes=[DecodeRow(sequence_id=1)]).decodes
            assert row.kv_length == 11 + position
        assert row.finish_reason == step_pb2.FINISH_REASON_CONTEXT
        (row,) = stream.ask(decodes=[DecodeRow(sequence_id=1, token_id=3)]).decodes
        assert reason_of(row.error) == "CONTEXT_EXCEEDED"


def test_sessions_do_not_see_each_other(server: Running) -> None:
    with server.stream("a") as first, server.stream("b") as second:
        first.ask(prefills=prompt())
        assert reason_of(second.ask(decodes=[DecodeRow(sequence_id=1)]).decodes[0].error)
        second.ask(prefills=prompt())  # the same id is free here
        second.ask(releases=[step_pb2.ReleaseRow(all=True)])
        row = DecodeRow(sequence_id=1)
        assert tokens_of(first.ask(decodes=[row]).decodes[0]) == greedy(PROMPT, 2)[1:]
        info = server.stub.GetSession(info_pb2.GetSessionRequest(), metadata=in_session("b"))
        assert not info.sequences
