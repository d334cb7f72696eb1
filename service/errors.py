"""Every error of the contract: its reason, its code, and what a caller may do. docs/errors.md shows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from decodestep.accel.errors import RowError

DOMAIN = "decodestep"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


@dataclass(frozen=True, slots=True)
class Reason:
    """One line of the table. `retry_ms`: wait this long and send the same again."""

    code: int
    help: str
    retry_ms: int | None = None


REASONS: dict[str, Reason] = {
    # Of a whole message: nothing of it ran.
    "INVALID_MESSAGE": Reason(code_pb2.INVALID_ARGUMENT, "BadRequest names the fields: correct them"),
    "STEP_ID_REUSED": Reason(
        code_pb2.INVALID_ARGUMENT, "the step id ran with other content: count on, never reuse an id"
    ),
    "STEP_ID_FORGOTTEN": Reason(
        code_pb2.FAILED_PRECONDITION, "the answer is no longer kept: ask GetSession what ran"
    ),
    "SESSION_HAS_STREAM": Reason(
        code_pb2.ALREADY_EXISTS, "a session has one Step stream: close the other or use another session"
    ),
    "TOO_MANY_SESSIONS": Reason(
        code_pb2.RESOURCE_EXHAUSTED, "wait until a session ends, or raise --max-sessions", 1000
    ),
    "QUEUE_FULL": Reason(code_pb2.RESOURCE_EXHAUSTED, "nothing ran: send it again", 50),
    "QUEUE_TIMEOUT": Reason(
        code_pb2.DEADLINE_EXCEEDED, "the message waited longer than queue_timeout_ms: nothing of it ran"
    ),
    "NO_TOKENIZER": Reason(code_pb2.FAILED_PRECONDITION, "the model folder has no tokenizer: send token ids"),
    "NO_CHAT_TEMPLATE": Reason(code_pb2.FAILED_PRECONDITION, "the tokenizer has no chat template: send text"),
    "TEMPLATE_FAILED": Reason(code_pb2.INVALID_ARGUMENT, "the chat template refuses these messages"),
    "NOT_SERVED_YET": Reason(code_pb2.UNIMPLEMENTED, "this part of the contract comes later"),
    # Of the server.
    "LOADING": Reason(code_pb2.UNAVAILABLE, "the model is loading: health says when it is done", 1000),
    "DEVICE_BROKEN": Reason(
        code_pb2.UNAVAILABLE, "the device has failed and the server ends: go to another one"
    ),
    "SHUTTING_DOWN": Reason(code_pb2.UNAVAILABLE, "the server ends: nothing of this ran"),
    # Of one row: other rows of the message are not touched.
    "INVALID_ROW": Reason(code_pb2.INVALID_ARGUMENT, "BadRequest names the fields: correct them"),
    "SEQUENCE_EXISTS": Reason(
        code_pb2.ALREADY_EXISTS, "start_position 0 creates: release the sequence first or take another id"
    ),
    "SEQUENCE_NOT_FOUND": Reason(
        code_pb2.NOT_FOUND, "never created, released, or its session ended: prefill it again"
    ),
    "KV_LENGTH_MISMATCH": Reason(
        code_pb2.FAILED_PRECONDITION, "metadata kv_length says how many tokens have KV: go on from there"
    ),
    "NO_PENDING_TOKEN": Reason(code_pb2.FAILED_PRECONDITION, "nothing was sampled: send token_id"),
    "CHAIN_BROKEN": Reason(
        code_pb2.ABORTED, "an earlier row of the sequence failed: send token_id and kv_length to go on"
    ),
    "CONTEXT_EXCEEDED": Reason(code_pb2.OUT_OF_RANGE, "the tokens reach past the context length"),
    "TRUNCATE_OUT_OF_RANGE": Reason(code_pb2.OUT_OF_RANGE, "truncate_to is beyond the KV length"),
    "NO_FREE_BLOCKS": Reason(
        code_pb2.RESOURCE_EXHAUSTED, "release a sequence and send the row again; nothing changed"
    ),
    "NO_FREE_SEQUENCES": Reason(
        code_pb2.RESOURCE_EXHAUSTED, "release a sequence and send the row again; nothing changed"
    ),
    "NOTHING_ALLOWED": Reason(
        code_pb2.INVALID_ARGUMENT, "the mask leaves no token: send another mask; nothing changed"
    ),
    "LOGITS_NOT_FINITE": Reason(code_pb2.INTERNAL, "the model gave NaN or infinity: check the weights"),
    "CANCELLED": Reason(code_pb2.CANCELLED, "cancelled by the client; kv_length says what was computed"),
    "DEVICE_FAULT": Reason(
        code_pb2.INTERNAL, "the device step failed and was undone: health says whether the device works"
    ),
}


@dataclass
class MessageError(Exception):
    """A message fails whole; nothing of it ran. `violations` are (field path, what was expected)."""

    reason: str
    message: str
    violations: list[tuple[str, str]] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


@dataclass
class InvalidRow(RowError):
    """A row whose own values are wrong. `violations` are (field, what was expected)."""

    violations: list[tuple[str, str]] = field(default_factory=list)


def status_of(error: MessageError | RowError) -> status_pb2.Status:
    """The google.rpc.Status of an error: ErrorInfo, and BadRequest and RetryInfo where they apply."""
    reason = REASONS[error.reason]
    status = status_pb2.Status(code=reason.code, message=f"{error.message} ({reason.help})")
    _attach(
        status,
        error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata),
    )
    violations = getattr(error, "violations", [])
    if violations:
        _attach(
            status,
            error_details_pb2.BadRequest(
                field_violations=[
                    error_details_pb2.BadRequest.FieldViolation(field=name, description=expected)
                    for name, expected in violations
                ]
            ),
        )
    if reason.retry_ms is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(reason.retry_ms)
        _attach(status, error_details_pb2.RetryInfo(retry_delay=delay))
    return status


async def abort(context: Context, error: MessageError | RowError) -> None:
    """End the RPC with the error's status. Raises."""
    status = rpc_status.to_status(status_of(error))
    await context.abort(status.code, status.details, status.trailing_metadata)


def _attach(status: status_pb2.Status, detail: Message) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)
