"""A light client of decodestep: plain values in and out, no torch."""

from decodestep.client.aio import AsyncClient, AsyncStepStream
from decodestep.client.client import Client, StepStream
from decodestep.client.errors import ServerRestartedError, ServiceError, Violation
from decodestep.client.types import (
    DecodeRow,
    FinishReason,
    LogprobsMode,
    Message,
    Outcome,
    Piece,
    PrefillRow,
    RowResult,
    SamplingParams,
    Step,
    StepResult,
)

__all__ = [
    "AsyncClient",
    "AsyncStepStream",
    "Client",
    "DecodeRow",
    "FinishReason",
    "LogprobsMode",
    "Message",
    "Outcome",
    "Piece",
    "PrefillRow",
    "RowResult",
    "SamplingParams",
    "ServerRestartedError",
    "ServiceError",
    "Step",
    "StepResult",
    "StepStream",
    "Violation",
]
