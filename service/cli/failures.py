"""What went wrong, for a person at a terminal."""

from __future__ import annotations

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from decodestep.accel.errors import ModelError

# What to do about codes that come from the connection rather than from a decodestep service.
_HINTS = {
    grpc.StatusCode.UNAVAILABLE: "start `decodestep serve` there, or name another address with --target "
    "(and --tls-root if it talks TLS)",
    grpc.StatusCode.UNIMPLEMENTED: "what answers there is no decodestep service of this version",
    grpc.StatusCode.DEADLINE_EXCEEDED: "something listens there but does not answer: look at its log",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "the message is too long: serve with a larger --max-message-size",
}


def explain_failure(error: Exception) -> str:
    """Message of an error that kept a server from starting; each problem of a model on a line of its own."""
    if isinstance(error, ModelError):
        return "\n".join([f"error: {error.source} cannot be served:", *(f"  {p}" for p in error.problems)])
    return f"error: {error}"


def explain_rpc(error: grpc.aio.AioRpcError, address: str) -> str:
    """Code, reason and message of an RPC that failed, which fields are wrong, and what to do."""
    reason = ""
    lines = []
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # it has what is read of a Call
    for detail in status.details if status else ():
        info = error_details_pb2.ErrorInfo()
        request = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            reason = f" {info.reason}"
        elif detail.Unpack(request):
            lines += [f"  {fault.field}: {fault.description}" for fault in request.field_violations]
        elif detail.Unpack(retry):
            lines.append(f"  try again after {retry.retry_delay.ToMilliseconds()} ms")
    if not reason and error.code() in _HINTS:
        lines.append(f"  {_HINTS[error.code()]}")
    return "\n".join([f"error: {address}: {error.code().name}{reason}: {error.details()}", *lines])
