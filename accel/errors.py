"""Errors of the device side. service/errors.py turns each into one gRPC status."""

from dataclasses import dataclass, field


class AccelError(Exception):
    """Base of every error that accel raises on purpose."""


class ModelError(AccelError):
    """A checkpoint that cannot be served: not supported, incomplete or damaged.

    `problems` names each fault once (field and value, or tensor and shape).
    """

    def __init__(self, source: str, problems: list[str]) -> None:
        self.source = source
        self.problems = problems
        super().__init__(f"{source}: " + "; ".join(problems))


class DeviceError(AccelError):
    """The device is missing, unusable or has failed. Says what to do about it."""


@dataclass
class RowError(AccelError):
    """One row cannot run; nothing of it took effect. Other rows go on.

    `reason` is the google.rpc.ErrorInfo reason; `metadata` holds what the caller needs to recover.
    """

    reason: str
    message: str
    metadata: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"
