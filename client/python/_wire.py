"""Values to protobuf and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtoMessage
from google.rpc import code_pb2, error_details_pb2, status_pb2

from decodestep.client import types
from decodestep.client.errors import ServiceError, Violation
from decodestep.v1 import generate_pb2, info_pb2, sampling_pb2, step_pb2, tokenizer_pb2

_DETAILS_KEY = "grpc-status-details-bin"
_FINISH = {step_pb2.FinishReason.Value(f"FINISH_REASON_{one.name}"): one for one in types.FinishReason}
_OUTCOME = {step_pb2.RowOutcome.Value(f"ROW_OUTCOME_{one.name}"): one for one in types.Outcome}
_StepResponse = (
    step_pb2.StepResponse | step_pb2.PrefillResponse | step_pb2.DecodeStepResponse | step_pb2.ReleaseResponse
)
T = TypeVar("T")


def sampling(params: types.SamplingParams | None) -> sampling_pb2.SamplingParams | None:
    """To protobuf."""
    if params is None:
        return None
    values = {one.name: getattr(params, one.name) for one in dataclasses.fields(params)}
    values["logit_bias"] = [
        sampling_pb2.LogitBias(token_id=token, bias=bias) for token, bias in params.logit_bias.items()
    ]
    values["logprobs_mode"] = f"LOGPROBS_MODE_{params.logprobs_mode.name}"
    return sampling_pb2.SamplingParams(**values)


def prefill_row(row: types.PrefillRow) -> step_pb2.PrefillRow:
    """To protobuf."""
    return step_pb2.PrefillRow(
        sequence_id=row.sequence_id,
        token_ids=row.token_ids,
        text=row.text,
        start_position=row.start_position,
        more=row.more,
        sampling=sampling(row.sampling),
        num_output_tokens=row.num_output_tokens,
        allowed_token_bitmask=row.allowed_token_bitmask,
        return_logits=row.return_logits,
    )


def decode_row(row: types.DecodeRow) -> step_pb2.DecodeRow:
    """To protobuf."""
    return step_pb2.DecodeRow(
        sequence_id=row.sequence_id,
        token_id=row.token_id,
        kv_length=row.kv_length,
        truncate_to=row.truncate_to,
        allowed_token_bitmask=row.allowed_token_bitmask,
        return_logits=row.return_logits,
    )


def step_request(step: types.Step, step_id: int) -> step_pb2.StepRequest:
    """To protobuf."""
    return step_pb2.StepRequest(
        step_id=step_id,
        queue_timeout_ms=milliseconds(step.queue_timeout),
        no_merge=step.no_merge,
        cancel=step_pb2.Cancellation(sequence_ids=step.cancel) if step.cancel else None,
        releases=[step_pb2.ReleaseRow(sequence_id=sequence_id) for sequence_id in step.releases],
        prefills=map(prefill_row, step.prefills),
        decodes=map(decode_row, step.decodes),
    )


def generate_request(
    text: str,
    token_ids: Iterable[int],
    messages: Iterable[types.Message],
    params: types.SamplingParams | None,
) -> generate_pb2.GenerateRequest:
    """To protobuf."""
    return generate_pb2.GenerateRequest(
        text=text, token_ids=token_ids, messages=map(chat_message, messages), sampling=sampling(params)
    )


def tokenize_request(
    text: str,
    messages: Iterable[types.Message],
    add_special_tokens: bool,
    add_generation_prompt: bool,
    template_arguments: Mapping[str, Any] | None,
) -> tokenizer_pb2.TokenizeRequest:
    """To protobuf."""
    request = tokenizer_pb2.TokenizeRequest(
        text=text,
        messages=map(chat_message, messages),
        add_special_tokens=add_special_tokens,
        add_generation_prompt=add_generation_prompt,
    )
    if template_arguments is not None:
        request.template_arguments.update(template_arguments)
    return request


def chat_message(message: types.Message) -> tokenizer_pb2.ChatMessage:
    """To protobuf."""
    return tokenizer_pb2.ChatMessage(role=message.role, content=message.content)


def milliseconds(seconds: float | None) -> int:
    """For a field where 0 means none; less than a millisecond is one."""
    return 0 if seconds is None else max(1, round(1000 * seconds))


def step_result(response: _StepResponse) -> types.StepResult:
    """From any answer that has rows."""
    releases: Iterable[step_pb2.ReleaseResult] = ()
    prefills: Iterable[step_pb2.RowResult] = ()
    decodes: Iterable[step_pb2.RowResult] = ()
    timing = step_pb2.Timing()
    executions: Iterable[step_pb2.Execution] = ()
    error: ServiceError | None = None
    if isinstance(response, step_pb2.ReleaseResponse):
        releases = response.results
    else:
        timing, executions = response.timing, response.executions
        if isinstance(response, step_pb2.PrefillResponse):
            prefills = response.rows
        elif isinstance(response, step_pb2.DecodeStepResponse):
            decodes = response.rows
        else:
            releases, prefills, decodes = response.releases, response.prefills, response.decodes
            error = _error_in(response)
    return types.StepResult(
        instance_id=response.instance_id,
        step_id=response.step_id if response.HasField("step_id") else None,
        from_record=response.from_record,
        releases=tuple(
            types.ReleaseResult(one.sequence_id, one.freed_blocks, _error_in(one)) for one in releases
        ),
        prefills=tuple(map(_row_result, prefills)),
        decodes=tuple(map(_row_result, decodes)),
        free_blocks=response.free_blocks,
        timing=_timing(timing),
        executions=tuple(map(_execution, executions)),
        error=error,
    )


def piece(response: generate_pb2.GenerateResponse) -> types.Piece:
    """From protobuf."""
    return types.Piece(
        tokens=tuple(map(_sampled, response.tokens)),
        text=response.text,
        finish_reason=_FINISH.get(response.finish_reason),
        num_prompt_tokens=response.num_prompt_tokens,
        seed=response.seed if response.HasField("seed") else None,
        prompt_logprobs=tuple(map(_prompt_logprob, response.prompt_logprobs)),
        timing=_timing(response.timing),
    )


def server_info(response: info_pb2.GetServerInfoResponse) -> types.ServerInfo:
    """From protobuf."""
    return types.ServerInfo(
        instance_id=response.instance_id,
        version=response.version,
        model=_plain(types.ModelInfo, response.model),
        device=_plain(types.DeviceInfo, response.device),
        kv_cache=_plain(types.KvCacheInfo, response.kv_cache),
        graph_buckets=tuple(response.graph_buckets),
        limits=_plain(types.Limits, response.limits),
        features=tuple(response.features),
        uptime_s=response.uptime_s,
    )


def session_info(response: info_pb2.GetSessionResponse) -> types.SessionInfo:
    """From protobuf."""
    return types.SessionInfo(
        instance_id=response.instance_id,
        session=response.session,
        sequences=tuple(
            types.SequenceInfo(
                one.sequence_id,
                one.kv_length,
                one.num_output_tokens,
                one.pending_token_id if one.HasField("pending_token_id") else None,
                one.num_blocks,
                _FINISH.get(one.finish_reason),
                one.chain_broken,
            )
            for one in response.sequences
        ),
        last_step_id=response.last_step_id if response.HasField("last_step_id") else None,
        has_stream=response.has_stream,
        queued=response.queued,
    )


def error_of(error: Any) -> ServiceError:
    """From the RpcError of a call, with the service's details where there are any."""
    code: grpc.StatusCode = error.code()
    message: str = error.details() or ""
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY:
            try:
                return _error(status_pb2.Status.FromString(value))
            except DecodeError:  # a proxy's, perhaps
                break
    return ServiceError(code.name, message)


def _error_in(
    message: step_pb2.StepResponse | step_pb2.RowResult | step_pb2.ReleaseResult,
) -> ServiceError | None:
    return _error(message.error) if message.HasField("error") else None


def _error(status: status_pb2.Status) -> ServiceError:
    info, bad, retry = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
    )
    retry_after: float | None = None
    for detail in status.details:
        detail.Unpack(info)
        detail.Unpack(bad)
        if detail.Unpack(retry):
            retry_after = retry.retry_delay.ToTimedelta().total_seconds()
    return ServiceError(
        code=code_pb2.Code.Name(code_pb2.Code.ValueType(status.code)),
        message=status.message,
        reason=info.reason,
        violations=tuple(Violation(one.field, one.description) for one in bad.field_violations),
        metadata=dict(info.metadata),
        retry_after=retry_after,
    )


def _row_result(row: step_pb2.RowResult) -> types.RowResult:
    return types.RowResult(
        sequence_id=row.sequence_id,
        outcome=_OUTCOME[row.outcome],
        kv_length=row.kv_length,
        token=_sampled(row.tokens[0]) if row.tokens else None,
        finish_reason=_FINISH.get(row.finish_reason),
        error=_error_in(row),
        seed=row.seed if row.HasField("seed") else None,
        prompt_logprobs=tuple(map(_prompt_logprob, row.prompt_logprobs)),
        logits=tuple(row.logits),
    )


def _sampled(token: sampling_pb2.SampledToken) -> types.SampledToken:
    logprob = token.logprob if token.HasField("logprob") else None
    return types.SampledToken(token.token_id, logprob, _top(token.top_logprobs))


def _prompt_logprob(one: sampling_pb2.PromptLogprob) -> types.PromptLogprob:
    return types.PromptLogprob(one.position, one.token_id, one.logprob, _top(one.top_logprobs))


def _top(entries: Iterable[sampling_pb2.TokenLogprob]) -> tuple[types.TokenLogprob, ...]:
    return tuple(types.TokenLogprob(one.token_id, one.logprob) for one in entries)


def _timing(timing: step_pb2.Timing) -> types.Timing:
    return types.Timing(
        *(
            getattr(timing, f"{one.name}_us") / 1e6  # named alike, in microseconds
            for one in dataclasses.fields(types.Timing)
        )
    )


def _execution(one: step_pb2.Execution) -> types.Execution:
    return types.Execution(
        one.kind == step_pb2.EXECUTION_KIND_PREFILL,
        one.rows,
        one.tokens,
        one.graph_bucket or None,
        one.eager_reason,
    )


def _plain(kind: type[T], message: ProtoMessage) -> T:
    """A dataclass whose fields are named like the message's."""
    values: dict[str, Any] = {}
    for one in dataclasses.fields(kind):  # type: ignore[arg-type]  # all that are passed are dataclasses
        value = getattr(message, one.name)
        if isinstance(value, str | int | float):
            values[one.name] = value
        elif isinstance(value, Mapping):
            values[one.name] = dict(value)
        else:
            values[one.name] = tuple(value)
    return kind(**values)
