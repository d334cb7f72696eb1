"""What both clients share: how the channel is set up, what the session is called, when to try again."""

from __future__ import annotations

import itertools
import secrets
import time

from decodestep.client.errors import ServiceError

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_TIMEOUT = 60.0
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),  # the server's limit is the one that counts
    ("grpc.max_send_message_length", -1),
    # Notice within 30 s that the other side is gone without a word.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
_FIRST_DELAY, _LAST_DELAY = 0.05, 1.0


class SessionName:
    """The session that all calls of a client name, and its step ids."""

    def __init__(self, name: str | None) -> None:
        self.is_own = name is None
        self.name = name or f"client-{secrets.token_hex(8)}"
        self.metadata = (("decodestep-session", self.name),)
        # Ids must rise in a session that may have had other clients before: microseconds do.
        self._step_ids = itertools.count(time.time_ns() // 1000)

    def next_step_id(self) -> int:
        """Rises."""
        return next(self._step_ids)


class Retry:
    """When to send the same again, up to a deadline."""

    def __init__(self, timeout: float) -> None:
        self._deadline = time.monotonic() + timeout
        self._delay = _FIRST_DELAY

    @property
    def remaining(self) -> float:
        """Seconds that are left, at least a little: the call itself then fails with its deadline."""
        return max(0.001, self._deadline - time.monotonic())

    def delay_after(self, error: ServiceError, also: str = "") -> float:
        """Seconds to wait. Raises `error` if waiting takes too long or will not help; for `also` it does."""
        delay = self._delay if error.retry_after is None else error.retry_after
        self._delay = min(2 * self._delay, _LAST_DELAY)
        may_help = error.is_transient or (also and error.reason == also)
        if not may_help or time.monotonic() + delay >= self._deadline:
            raise error
        return delay
