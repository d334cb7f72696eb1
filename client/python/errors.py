"""Errors of a server, of a whole call and of one row alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Violation:
    """One field that was wrong, and what was expected of it."""

    field: str
    expected: str


@dataclass(eq=False)
class ServiceError(Exception):
    """Something that a server, or the way to it, refused. docs/errors.md lists the reasons.

    `code` is the name of a gRPC status code. `reason` is empty if the error does not come from the service
    itself. `retry_after`, in seconds, if sending the same again may help.
    """

    code: str
    message: str
    reason: str = ""
    violations: tuple[Violation, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    retry_after: float | None = None

    def __str__(self) -> str:
        head = f"{self.code}: {self.message}" if not self.reason else f"{self.reason}: {self.message}"
        return "\n  ".join([head, *(f"{one.field}: {one.expected}" for one in self.violations)])

    @property
    def is_transient(self) -> bool:
        """Whether the same message, with the same step id, may be sent again."""
        return self.retry_after is not None or (self.code == "UNAVAILABLE" and not self.reason)


class ServerRestartedError(Exception):
    """Another server instance answers now: every sequence is gone."""
