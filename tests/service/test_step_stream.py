"""The Step stream: parts and messages in order, one answer each, decode rows sent ahead of what they feed."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest
from harness import (
    APPENDED,
    FAILED,
    SAMPLED,
    SKIPPED,
    DecodeRow,
    PrefillRow,
    ReleaseRow,
    Running,
    SamplingParams,
    StepRequest,
    code_of,
    encode,
    eventually,
    fields_of,
    greedy,
    in_session,
    reason_of,
    tokens_of,
)

from decodestep.v1 import info_pb2, step_pb2

PROMPT = encode("And God said, Let there be light:")


def decode(*sequence_ids: int, **fields: int) -> StepRequest:
    return StepRequest(decodes=[DecodeRow(sequence_id=one, **fields) for one in sequence_ids])


def test_a_prompt_and_steps_give_what_transformers_generates(server: Running) -> None:
    want = greedy(PROMPT, 33)
    with server.stream("s") as stream:
        answer = stream.ask(step_id=5, prefills=[PrefillRow(sequence_id=7, token_ids=PROMPT)])
        (row,) = answer.prefills
        assert (row.sequence_id, row.outcome, row.kv_length) == (7, SAMPLED, len(PROMPT))
        assert answer.step_id == 5 and not answer.from_record and not answer.HasField("error")
        have = tokens_of(row)
        for position in range(32):
            answer = stream.ask(decodes=[DecodeRow(sequence_id=7, kv_length=len(PROMPT) + position)])
            assert answer.decodes[0].kv_length == len(PROMPT) + position + 1
            assert not answer.HasField("step_id")
            have += tokens_of(answer.decodes[0])
    assert have == want


def test_steps_are_sent_ahead_of_their_answers(server: Running) -> None:
    """A row without token_id feeds what was sampled last, also if that has not reached the client."""
    prompts = [encode(text) for text in ("In the beginning", "The LORD is my", "Blessed are they")]
    with server.stream("s") as stream:
        rows = [PrefillRow(sequence_id=one, token_ids=prompt) for one, prompt in enumerate(prompts)]
        stream.send(StepRequest(prefills=rows), *(decode(0, 1, 2) for _ in range(40)))
        first = stream.receive()
        have = [tokens_of(row) for row in first.prefills]
        for _ in range(40):
            for row in stream.receive().decodes:
                have[row.sequence_id] += tokens_of(row)
    assert have == [greedy(prompt, 41) for prompt in prompts]


def test_the_parts_of_a_message_take_effect_in_order(server: Running) -> None:
    """Releases, prefills, decodes: one message may replace a sequence and step another."""
    other = encode("Praise ye the LORD")
    with server.stream("s") as stream:
        stream.ask(
            prefills=[
                PrefillRow(sequence_id=1, token_ids=PROMPT),
                PrefillRow(sequence_id=2, token_ids=PROMPT),
            ]
        )
        answer = stream.ask(
            releases=[ReleaseRow(sequence_id=1)],
            prefills=[PrefillRow(sequence_id=1, token_ids=other)],
            decodes=[DecodeRow(sequence_id=2)],
        )
        assert not answer.releases[0].HasField("error") and answer.releases[0].freed_blocks == 1
        assert tokens_of(answer.prefills[0]) == greedy(other, 1)
        assert tokens_of(answer.decodes[0]) == greedy(PROMPT, 2)[1:]
        answer = stream.ask(releases=[ReleaseRow(sequence_id=2)], decodes=[DecodeRow(sequence_id=2)])
        assert reason_of(answer.decodes[0].error) == "SEQUENCE_NOT_FOUND"


def test_what_was_sent_past_a_stop_is_skipped(server: Running) -> None:
    """Length, history and blocks are those at the stop; a row with a token goes on from there."""
    want = greedy(PROMPT, 12)
    stop = want[4]
    at = want.index(stop)
    params = SamplingParams(stop_token_ids=[stop])
    with server.stream("s") as stream:
        stream.send(
            StepRequest(prefills=[PrefillRow(sequence_id=1, token_ids=PROMPT, sampling=params)]),
            *(decode(1) for _ in range(at + 3)),
        )
        rows = [stream.receive().prefills[0]]
        rows += [stream.receive().decodes[0] for _ in range(at + 3)]
        assert [tokens_of(row)[0] for row in rows[: at + 1]] == want[: at + 1]
        stopped = rows[at]
        assert stopped.finish_reason == step_pb2.FINISH_REASON_STOP
        for row in rows[at + 1 :]:
            assert row.outcome == SKIPPED and not row.tokens and not row.HasField("error")
            assert (row.kv_length, row.finish_reason) == (stopped.kv_length, stopped.finish_reason)
        info = server.stub.GetSession(info_pb2.GetSessionRequest(), metadata=in_session("s"))
        assert info.sequences[0].kv_length == stopped.kv_length == len(PROMPT) + at
        # Fed by hand, the sequence goes on as if it had never stopped.
        answer = stream.ask(decodes=[DecodeRow(sequence_id=1, token_id=stop, kv_length=stopped.kv_length)])
        assert answer.decodes[0].outcome == SAMPLED
        assert tokens_of(answer.decodes[0]) == [want[at + 1]]
        assert answer.decodes[0].finish_reason == step_pb2.FINISH_REASON_UNSPECIFIED


@pytest.mark.parametrize("count", [1, 2, 5])
def test_max_tokens_finishes(server: Running, count: int) -> None:
    with server.stream("s") as stream:
        params = SamplingParams(max_tokens=count)
        stream.send(
            StepRequest(prefills=[PrefillRow(sequence_id=1, token_ids=PROMPT, sampling=params)]),
            *(decode(1) for _ in range(count)),
        )
        rows = [stream.receive().prefills[0]] + [stream.receive().decodes[0] for _ in range(count)]
    assert [row.finish_reason for row in rows] == [0] * (count - 1) + [step_pb2.FINISH_REASON_LENGTH] * 2
    assert [row.outcome for row in rows] == [SAMPLED] * count + [SKIPPED]


def test_after_a_failed_row_its_chain_is_broken(server: Running) -> None:
    """Rows that were sent ahead must not run on a state that their sender never saw."""
    want = greedy(PROMPT, 4)
    with server.stream("s") as stream:
        stream.send(
            StepRequest(prefills=[PrefillRow(sequence_id=one, token_ids=PROMPT) for one in (1, 2)]),
            StepRequest(decodes=[DecodeRow(sequence_id=1, kv_length=99), DecodeRow(sequence_id=2)]),
            decode(1, 2),
            StepRequest(decodes=[DecodeRow(sequence_id=1, token_id=want[0])]),
            StepRequest(decodes=[DecodeRow(sequence_id=1, token_id=want[0], kv_length=len(PROMPT))]),
            decode(1),
        )
        stream.receive()
        failed, neighbour = stream.receive().decodes
        assert failed.outcome == FAILED and code_of(failed.error) == "FAILED_PRECONDITION"
        assert reason_of(failed.error) == "KV_LENGTH_MISMATCH" and failed.kv_length == len(PROMPT)
        assert tokens_of(neighbour) == want[1:2]
        broken, neighbour = stream.receive().decodes
        assert code_of(broken.error) == "ABORTED" and reason_of(broken.error) == "CHAIN_BROKEN"
        assert tokens_of(neighbour) == want[2:3]
        assert reason_of(stream.receive().decodes[0].error) == "CHAIN_BROKEN"  # token_id alone is not enough
        assert tokens_of(stream.receive().decodes[0]) == want[1:2]
        assert tokens_of(stream.receive().decodes[0]) == want[2:3]


def test_a_prompt_in_chunks_is_a_prompt(server: Running) -> None:
    want = greedy(PROMPT, 2)
    with server.stream("s") as stream:
        start = 0
        for size in (1, 2, len(PROMPT) - 3):
            is_last = start + size == len(PROMPT)
            (row,) = stream.ask(
                prefills=[
                    PrefillRow(
                        sequence_id=1,
                        token_ids=PROMPT[start : start + size],
                        start_position=start,
                        more=not is_last,
                    )
                ]
            ).prefills
            start += size
            assert (row.outcome, row.kv_length) == (SAMPLED if is_last else APPENDED, start)
        assert tokens_of(row) == want[:1]
        assert tokens_of(stream.ask(decodes=[DecodeRow(sequence_id=1)]).decodes[0]) == want[1:]


def test_a_message_that_is_wrong_fails_whole_and_the_stream_goes_on(server: Running) -> None:
    with server.stream("s") as stream:
        stream.ask(prefills=[PrefillRow(sequence_id=1, token_ids=PROMPT)])
        answer = stream.ask(step_id=3, decodes=[DecodeRow(sequence_id=1), DecodeRow(sequence_id=1)])
        assert code_of(answer.error) == "INVALID_ARGUMENT" and reason_of(answer.error) == "INVALID_MESSAGE"
        assert fields_of(answer.error) == ["decodes[1].sequence_id"]
        assert answer.step_id == 3 and not answer.decodes and answer.free_blocks == server.free_blocks
        assert server.device.forwards == [len(PROMPT)]
        answer = stream.ask(step_id=3, decodes=[DecodeRow(sequence_id=1)])  # it never ran: the id is free
        assert tokens_of(answer.decodes[0]) == greedy(PROMPT, 2)[1:]


def test_a_session_has_one_stream(server: Running) -> None:
    with server.stream("s") as stream:
        stream.ask()
        with pytest.raises(grpc.RpcError) as refused:
            server.stream("s").ask()
        assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
        assert reason_of(refused.value) == "SESSION_HAS_STREAM"
        server.stream("other").ask()
        stream.ask()  # the first one lives


def test_unary_calls_go_beside_a_stream(server: Running) -> None:
    want = greedy(PROMPT, 4)
    with server.stream("s") as stream:
        stream.ask(prefills=[PrefillRow(sequence_id=1, token_ids=PROMPT)])
        rows = [DecodeRow(sequence_id=1)]
        unary = server.stub.DecodeStep(step_pb2.DecodeStepRequest(rows=rows), metadata=in_session("s"))
        assert tokens_of(unary.rows[0]) == want[1:2]
        assert tokens_of(stream.ask(decodes=rows).decodes[0]) == want[2:3]


def test_half_closing_answers_what_was_sent(server: Running) -> None:
    with server.stream("s") as stream:
        stream.send(StepRequest(prefills=[PrefillRow(sequence_id=1, token_ids=PROMPT)]), decode(1), decode(1))
        stream.end()
        answers = list(stream.call)
    assert tokens_of(answers[0].prefills[0]) == greedy(PROMPT, 1)
    assert [tokens_of(answer.decodes[0])[0] for answer in answers[1:]] == greedy(PROMPT, 3)[1:]


def test_a_stream_is_read_so_far_ahead_and_no_further(start: Callable[..., Running]) -> None:
    server = start(max_in_flight=3)
    with server.device.held(), server.stream("s") as stream:
        stream.send(StepRequest(prefills=[PrefillRow(sequence_id=1, token_ids=PROMPT)]), *[decode(1)] * 9)
        server.device.wait_held()

        def queued() -> int:
            request = info_pb2.GetSessionRequest()
            return int(server.stub.GetSession(request, metadata=in_session("s")).queued)

        eventually(lambda: queued() == 3)
        assert queued() == 3
        server.device.let_go()
        stream.receive()
        have = [tokens_of(stream.receive().decodes[0])[0] for _ in range(9)]
    assert have == greedy(PROMPT, 10)[1:]


def test_an_answer_says_where_the_time_went_and_what_ran(server: Running) -> None:
    with server.stream("s") as stream:
        answer = stream.ask(
            prefills=[PrefillRow(sequence_id=one, token_ids=PROMPT) for one in (1, 2)],
        )
        (execution,) = answer.executions
        assert execution.kind == step_pb2.EXECUTION_KIND_PREFILL
        assert (execution.rows, execution.tokens) == (2, 2 * len(PROMPT))
        assert execution.graph_bucket == 0 and execution.eager_reason
        timing = answer.timing
        assert timing.device_us > 0 and timing.sample_us > 0 and timing.task_update_us == 0
        parts = timing.queue_us + timing.prepare_us + timing.device_us + timing.sample_us
        assert parts <= timing.total_us
        assert answer.free_blocks == server.free_blocks == 254
        assert len(answer.instance_id) >= 8
        both = stream.ask(
            prefills=[PrefillRow(sequence_id=3, token_ids=PROMPT)], decodes=[DecodeRow(sequence_id=1)]
        )
        kinds = [execution.kind for execution in both.executions]
        assert kinds == [step_pb2.EXECUTION_KIND_PREFILL, step_pb2.EXECUTION_KIND_DECODE]
