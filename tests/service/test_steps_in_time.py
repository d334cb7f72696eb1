"""What waits, what is merged, what is cancelled, and what a retry gets."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest
from harness import (
    FAILED,
    DecodeRow,
    PrefillRow,
    Running,
    SamplingParams,
    StepRequest,
    code_of,
    encode,
    eventually,
    greedy,
    in_session,
    reason_of,
    tokens_of,
)

from decodestep.v1 import info_pb2, step_pb2

PROMPT = encode("And God said, Let there be light:")
END = len(PROMPT)


def prompt(sequence_id: int = 1, **fields: object) -> list[PrefillRow]:
    return [PrefillRow(**{"sequence_id": sequence_id, "token_ids": PROMPT} | fields)]


def decode(*sequence_ids: int, **fields: object) -> StepRequest:
    return StepRequest(decodes=[DecodeRow(sequence_id=one) for one in sequence_ids], **fields)


def queued(server: Running, session: str) -> int:
    request = info_pb2.GetSessionRequest()
    return int(server.stub.GetSession(request, metadata=in_session(session)).queued)


@pytest.mark.parametrize("no_merge", [False, True])
def test_decode_rows_of_all_sessions_are_merged(server: Running, no_merge: bool) -> None:
    with server.stream("a") as a, server.stream("b") as b, server.stream("c") as c:
        for stream in (a, b, c):
            stream.ask(prefills=prompt())
        server.device.forwards.clear()
        with server.device.held():
            a.send(decode(1))
            server.device.wait_held()  # this step is closed: what comes now is the next one
            b.send(decode(1, no_merge=no_merge))
            eventually(lambda: queued(server, "b") == 1)
            c.send(decode(1))
            eventually(lambda: queued(server, "c") == 1)
        answers = [stream.receive() for stream in (a, b, c)]
        assert [tokens_of(answer.decodes[0]) for answer in answers] == [greedy(PROMPT, 2)[1:]] * 3
        assert server.device.forwards == ([1, 1, 1] if no_merge else [1, 2])
        assert [answer.executions[0].rows for answer in answers] == ([1, 1, 1] if no_merge else [1, 2, 2])


def test_steps_of_others_run_between_the_pieces_of_a_long_prompt(start: Callable[..., Running]) -> None:
    """A prompt of at most max_prefill_tokens is not cut."""
    server = start(max_prefill_tokens=16)
    long = [7] * 50
    with server.stream("a") as a, server.stream("b") as b:
        b.ask(prefills=prompt())
        server.device.forwards.clear()
        with server.device.held():
            a.send(StepRequest(prefills=[PrefillRow(sequence_id=1, token_ids=long)]))
            server.device.wait_held()
            b.send(*[decode(1)] * 6)
            eventually(lambda: queued(server, "b") == 6)
        have = [tokens_of(b.receive().decodes[0])[0] for _ in range(6)]
        assert have == greedy(PROMPT, 7)[1:]
        assert tokens_of(a.receive().prefills[0]) == greedy(tuple(long), 1)
        assert server.device.forwards == [16, 1, 16, 1, 16, 1, 2, 1, 1, 1]


def test_a_message_that_waits_too_long_does_not_run(server: Running) -> None:
    with server.stream("a") as a, server.stream("b") as b:
        a.ask(prefills=prompt())
        b.ask(prefills=prompt())
        with server.device.held():
            a.send(decode(1))
            server.device.wait_held()
            b.send(decode(1, queue_timeout_ms=1, step_id=4))
            eventually(lambda: queued(server, "b") == 1)
        answer = b.receive()
        assert code_of(answer.error) == "DEADLINE_EXCEEDED" and reason_of(answer.error) == "QUEUE_TIMEOUT"
        # It never ran, so it is not recorded.
        answer = b.ask(decodes=[DecodeRow(sequence_id=1)], step_id=4)
        assert tokens_of(answer.decodes[0]) == greedy(PROMPT, 2)[1:] and not answer.from_record


def test_a_full_queue_refuses_unary_calls_and_holds_streams_back(start: Callable[..., Running]) -> None:
    server = start(max_queue=1)
    with server.stream("a") as a:
        a.ask(prefills=prompt())
        with server.device.held():
            a.send(*[decode(1)] * 4)
            server.device.wait_held()
            eventually(lambda: queued(server, "a") == 4)
            with pytest.raises(grpc.RpcError) as refused:
                server.stub.Prefill(step_pb2.PrefillRequest(rows=prompt()), metadata=in_session("b"))
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert reason_of(refused.value) == "QUEUE_FULL"
        assert [tokens_of(a.receive().decodes[0])[0] for _ in range(4)] == greedy(PROMPT, 5)[1:]


@pytest.mark.parametrize("by", ["call", "field"])
def test_cancelling_a_long_prompt_keeps_what_was_computed(start: Callable[..., Running], by: str) -> None:
    server = start(max_prefill_tokens=16)
    cancel = step_pb2.Cancellation(sequence_ids=[1])
    with server.stream("a") as a:
        server.device.hold()
        a.send(StepRequest(prefills=[PrefillRow(sequence_id=1, token_ids=[7] * 50)]), decode(1))
        server.device.wait_held()
        server.device.let_one()
        server.device.wait_held()  # the second piece is under way
        eventually(lambda: queued(server, "a") == 2)
        if by == "call":
            told = server.stub.Cancel(step_pb2.CancelRequest(cancel=cancel), metadata=in_session("a"))
            assert told.cancelled == 2
        else:
            a.send(StepRequest(cancel=cancel))
            eventually(lambda: queued(server, "a") == 3)
        server.device.let_go()
        (row,) = a.receive().prefills
        assert (row.outcome, reason_of(row.error), row.kv_length) == (FAILED, "CANCELLED", 32)
        assert server.free_blocks == 255  # those of what did not come are free again
        assert reason_of(a.receive().decodes[0].error) == "CANCELLED"
        if by == "field":
            a.receive()
        rest = PrefillRow(sequence_id=1, token_ids=[7] * 18, start_position=32)
        assert tokens_of(a.ask(prefills=[rest]).prefills[0]) == greedy((7,) * 50, 1)


def test_dropping_a_stream_ends_what_waits(start: Callable[..., Running]) -> None:
    server = start(max_prefill_tokens=16, stream_grace=60)
    a = server.stream("a")
    a.ask(prefills=prompt(2))
    server.device.hold()
    a.send(StepRequest(prefills=[PrefillRow(sequence_id=1, token_ids=[7] * 50)], step_id=1), decode(2))
    server.device.wait_held()
    eventually(lambda: queued(server, "a") == 2)
    a.cancel()
    eventually(lambda: queued(server, "a") == 1)  # what has not started is gone
    server.device.let_go()
    eventually(lambda: queued(server, "a") == 0)
    info = server.stub.GetSession(info_pb2.GetSessionRequest(), metadata=in_session("a"))
    assert {one.sequence_id: one.kv_length for one in info.sequences} == {1: 16, 2: END}
    with server.stream("a") as again:  # within the grace time a new stream takes over
        assert tokens_of(again.ask(decodes=[DecodeRow(sequence_id=2)]).decodes[0]) == greedy(PROMPT, 2)[1:]


def test_dropping_a_unary_call_ends_it(server: Running) -> None:
    with server.device.held(), server.stream("a") as a:
        a.send(StepRequest(prefills=prompt()))
        server.device.wait_held()
        call = server.stub.Prefill.future(
            step_pb2.PrefillRequest(rows=prompt(), step_id=1), metadata=in_session("dropped")
        )
        eventually(lambda: queued(server, "dropped") == 1)
        call.cancel()
        eventually(lambda: queued(server, "dropped") == 0)
        server.device.let_go()
        a.receive()
    assert server.device.forwards == [END]


def test_a_retry_never_steps_twice(server: Running) -> None:
    """From the record, over any call and stream; other content is refused."""
    with server.stream("a") as a:
        a.ask(prefills=prompt(), step_id=1)
        first = a.ask(decodes=[DecodeRow(sequence_id=1, return_logits=True)], step_id=2)
    with server.stream("a") as a:
        again = a.ask(decodes=[DecodeRow(sequence_id=1, return_logits=True)], step_id=2)
        assert again.from_record and tokens_of(again.decodes[0]) == tokens_of(first.decodes[0])
        assert len(first.decodes[0].logits) > 0 and not again.decodes[0].logits
        assert server.device.forwards == [END, 1]
        other = a.ask(decodes=[DecodeRow(sequence_id=1)], step_id=2)
        assert (code_of(other.error), reason_of(other.error)) == ("INVALID_ARGUMENT", "STEP_ID_REUSED")
        rows = [DecodeRow(sequence_id=1, return_logits=True)]
        unary = server.stub.DecodeStep(
            step_pb2.DecodeStepRequest(rows=rows, step_id=2), metadata=in_session("a")
        )
        assert unary.from_record and tokens_of(unary.rows[0]) == tokens_of(first.decodes[0])
        assert server.device.forwards == [END, 1]


def test_a_retry_waits_for_the_one_that_runs(server: Running) -> None:
    """Also when the first call is given up meanwhile."""
    request = step_pb2.PrefillRequest(rows=prompt(), step_id=1)
    with server.device.held():
        first = server.stub.Prefill.future(request, metadata=in_session("waits"))
        server.device.wait_held()
        second = server.stub.Prefill.future(request, metadata=in_session("waits"))
        first.cancel()
        with pytest.raises(grpc.FutureTimeoutError):
            second.result(timeout=0.1)
    answer = second.result(timeout=30)
    assert answer.from_record and tokens_of(answer.rows[0]) == greedy(PROMPT, 1)
    assert server.device.forwards == [END]


def test_old_answers_are_forgotten_and_say_so(start: Callable[..., Running]) -> None:
    server = start(step_id_window=2)
    with server.stream("a") as a:
        a.ask(prefills=prompt(), step_id=1)
        for step_id in (2, 3):
            a.ask(decodes=[DecodeRow(sequence_id=1)], step_id=step_id)
        answer = a.ask(prefills=prompt(), step_id=1)
        assert code_of(answer.error) == "FAILED_PRECONDITION"
        assert reason_of(answer.error) == "STEP_ID_FORGOTTEN"
        info = server.stub.GetSession(info_pb2.GetSessionRequest(), metadata=in_session("a"))
        assert (info.last_step_id, info.has_stream) == (3, True)


def test_a_session_ends_with_its_stream_and_frees_what_it_holds(start: Callable[..., Running]) -> None:
    server = start(stream_grace=0.2)
    free = server.free_blocks
    with server.stream("bound") as bound, server.stream() as default:
        bound.ask(prefills=prompt())
        default.ask(prefills=prompt())
        assert server.free_blocks == free - 2
    eventually(lambda: server.free_blocks == free - 1)  # the default session is never bound
    info = server.stub.GetSession(info_pb2.GetSessionRequest())
    assert [one.sequence_id for one in info.sequences] == [1]


def test_an_idle_session_ends(start: Callable[..., Running]) -> None:
    server = start(session_idle=0.3, max_sessions=1)
    free = server.free_blocks
    server.stub.Prefill(step_pb2.PrefillRequest(rows=prompt()), metadata=in_session("a"))
    with pytest.raises(grpc.RpcError) as refused:
        server.stub.Prefill(step_pb2.PrefillRequest(rows=prompt()), metadata=in_session("b"))
    assert reason_of(refused.value) == "TOO_MANY_SESSIONS"
    eventually(lambda: server.free_blocks == free)
    server.stub.Prefill(step_pb2.PrefillRequest(rows=prompt()), metadata=in_session("b"))


def test_a_fault_of_the_device_is_undone_and_reported(start: Callable[..., Running]) -> None:
    """One that the device survives fails its rows; one that it does not ends the service."""
    from grpc_health.v1 import health_pb2

    server = start()
    model = server.executor.model.model
    with server.stream("a") as a:
        a.ask(prefills=prompt())
        handle = model.register_forward_pre_hook(_fail_once())
        (row,) = a.ask(decodes=[DecodeRow(sequence_id=1)]).decodes
        handle.remove()
        assert (code_of(row.error), reason_of(row.error)) == ("INTERNAL", "DEVICE_FAULT")
        assert row.kv_length == END
        want = greedy(PROMPT, 2)
        (row,) = a.ask(decodes=[DecodeRow(sequence_id=1, token_id=want[0], kv_length=END)]).decodes
        assert tokens_of(row) == want[1:]

        model.norm.weight.data = model.norm.weight.data[:-1]  # now nothing can be computed
        (row,) = a.ask(decodes=[DecodeRow(sequence_id=1)]).decodes
        assert reason_of(row.error) == "DEVICE_FAULT"
        check = health_pb2.HealthCheckRequest()
        eventually(lambda: server.health.Check(check).status == health_pb2.HealthCheckResponse.NOT_SERVING)
        with pytest.raises(grpc.RpcError) as refused:
            server.stub.Prefill(step_pb2.PrefillRequest(rows=prompt()), metadata=in_session("b"))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert reason_of(refused.value) == "DEVICE_BROKEN"


def _fail_once() -> Callable[..., None]:
    done: list[bool] = []

    def fail(*_: object) -> None:
        if not done:
            done.append(True)
            raise RuntimeError("the device says no")

    return fail


def test_health_answers_while_the_device_is_busy(server: Running) -> None:
    from grpc_health.v1 import health_pb2

    with server.stream("a") as a:
        with server.device.held():
            a.send(StepRequest(prefills=prompt(sampling=SamplingParams(max_tokens=1))))
            server.device.wait_held()
            status = server.health.Check(health_pb2.HealthCheckRequest(), timeout=10).status
            assert status == health_pb2.HealthCheckResponse.SERVING
        a.receive()
