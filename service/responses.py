"""Reports to protobuf."""

from __future__ import annotations

from collections.abc import Iterable

from decodestep.accel.executor import TokenLogprobs
from decodestep.accel.sequences import FinishReason
from decodestep.service.errors import status_of
from decodestep.service.messages import ExecutionReport, Outcome, ReleaseReport, Report, RowReport
from decodestep.v1 import sampling_pb2, step_pb2

EAGER_REASON = "the device has no graphs"

_OUTCOMES = {outcome: step_pb2.RowOutcome.Value(f"ROW_OUTCOME_{outcome.name}") for outcome in Outcome}
FINISH_REASONS = {
    reason: step_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason
}


def row_result(report: RowReport) -> step_pb2.RowResult:
    """What became of one row."""
    result = step_pb2.RowResult(
        sequence_id=report.sequence_id, outcome=_OUTCOMES[report.outcome], kv_length=report.kv_length
    )
    if report.sampled is not None:
        result.tokens.append(sampled_token(report.sampled))
    if report.finish is not None:
        result.finish_reason = FINISH_REASONS[report.finish]
    if report.error is not None:
        result.error.CopyFrom(status_of(report.error))
    if report.seed is not None:
        result.seed = report.seed
    if report.prompt:
        result.prompt_logprobs.extend(prompt_logprobs(report))
    if report.logits is not None:
        result.logits.extend(report.logits)
    return result


def sampled_token(sampled: TokenLogprobs) -> sampling_pb2.SampledToken:
    """One sampled token."""
    return sampling_pb2.SampledToken(
        token_id=sampled.token_id, logprob=sampled.logprob, top_logprobs=_top(sampled)
    )


def prompt_logprobs(report: RowReport) -> Iterable[sampling_pb2.PromptLogprob]:
    """Logprobs along the prompt."""
    for offset, place in enumerate(report.prompt):
        yield sampling_pb2.PromptLogprob(
            position=report.prompt_start + offset,
            token_id=place.token_id,
            logprob=place.logprob,  # type: ignore[arg-type]  # a prompt has it at every place
            top_logprobs=_top(place),
        )


def _top(place: TokenLogprobs) -> list[sampling_pb2.TokenLogprob]:
    return [sampling_pb2.TokenLogprob(token_id=token, logprob=logprob) for token, logprob in place.top]


def release_result(report: ReleaseReport) -> step_pb2.ReleaseResult:
    """What became of one release."""
    result = step_pb2.ReleaseResult(sequence_id=report.sequence_id, freed_blocks=report.freed_blocks)
    if report.error is not None:
        result.error.CopyFrom(status_of(report.error))
    return result


def timing(report: Report, total: float) -> step_pb2.Timing:
    """Where the time went; `total` in seconds."""
    return step_pb2.Timing(
        queue_us=_microseconds(report.queue),
        prepare_us=_microseconds(report.prepare),
        device_us=_microseconds(report.device),
        sample_us=_microseconds(report.sample),
        total_us=_microseconds(total),
    )


def execution(report: ExecutionReport) -> step_pb2.Execution:
    """One device step."""
    return step_pb2.Execution(
        kind=step_pb2.EXECUTION_KIND_PREFILL if report.is_prefill else step_pb2.EXECUTION_KIND_DECODE,
        rows=report.rows,
        tokens=report.tokens,
        eager_reason=EAGER_REASON,
    )


def _microseconds(seconds: float) -> int:
    return min(round(seconds * 1e6), 2**32 - 1)
