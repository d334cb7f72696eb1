"""Order: which entries make the next device step."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from decodestep.service.errors import MessageError
from decodestep.service.messages import Message, Report
from decodestep.service.rows import Admitted, Sequences


@dataclass(slots=True, eq=False)
class Entry:
    """One message on its way. Its session's entries run in order, those of others between them."""

    owner: Sequences
    message: Message
    future: asyncio.Future[Report]  # of the event loop; only its thread may touch it
    arrived: float = field(default_factory=time.perf_counter)

    # Written by the device's thread, `is_started` under the queue's lock.
    is_started: bool = False  # taken for its first turn: from now on it gets an answer
    has_expired: bool = False
    is_open: bool = False  # its releases are done and its prefill rows admitted
    report: Report = field(default_factory=Report)
    prefills: dict[int, Admitted] = field(default_factory=dict)  # under way, by row

    # Written by the event loop, read at the next piece or before the step closes.
    is_cancelled: bool = False  # as a whole, on demand: its rows fail and break their chains
    is_dropped: bool = False  # nobody waits for it any more
    num_waiting: int = 1  # calls that wait for its answer
    cancelled_ids: set[int] = field(default_factory=set)

    @property
    def has_prefills(self) -> bool:
        """Whether prefill rows are still to be computed."""
        return bool(self.prefills) if self.is_open else bool(self.message.prefills)

    def expires(self) -> bool:
        """Whether it has waited too long to start."""
        timeout = self.message.queue_timeout
        if not self.is_started and timeout is not None:
            self.has_expired = time.perf_counter() - self.arrived > timeout
        return self.has_expired


class StepQueue:
    """A ring of sessions, each with its entries in order of arrival.

    Each turn runs one piece of a prompt, or one decode step in which the rows of all sessions that are ready
    are merged. A session that had its turn goes to the end of the ring.
    """

    def __init__(self, max_queue: int, max_rows: int) -> None:
        self._max_queue = max_queue
        self._max_rows = max_rows
        self._ring: OrderedDict[Sequences, deque[Entry]] = OrderedDict()
        self._changed = threading.Condition()
        self._closed: MessageError | None = None
        self._waiting = 0

    def put(self, entry: Entry, must_fit: bool) -> None:
        """Append to its session's entries. MessageError: QUEUE_FULL (`must_fit`), or why it is closed."""
        with self._changed:
            if self._closed is not None:
                raise self._closed
            if must_fit and self._waiting >= self._max_queue:
                raise MessageError("QUEUE_FULL", f"{self._waiting} messages wait, the most that may")
            self._waiting += 1
            self._ring.setdefault(entry.owner, deque()).append(entry)
            self._changed.notify()

    def close(self, error: MessageError) -> list[Entry]:
        """Take nothing more. Returns what has not started, to be answered; prompts under way stop."""
        with self._changed:
            self._closed = error
            entries = self._entries()
            for entry in entries:
                entry.is_dropped = True
            self._changed.notify()
            return [entry for entry in entries if not entry.is_started]

    def break_off(self, error: MessageError) -> list[Entry]:
        """Take nothing more and forget everything. Returns all entries, to be answered."""
        with self._changed:
            self._closed = error
            entries = self._entries()
            self._ring.clear()
            return entries

    def drop(self, owner: Sequences, entries: Iterable[Entry]) -> list[Entry]:
        """Nobody waits for these: what has not started goes as if it never came, and is returned.

        A prompt under way stops at its next piece.
        """
        with self._changed:
            dropped = []
            for entry in entries:
                entry.is_dropped = True
                if not entry.is_started and entry in self._ring.get(owner, ()):
                    dropped.append(entry)
            return dropped

    def entries(self, owner: Sequences) -> list[Entry]:
        """Entries of a session that wait or run."""
        with self._changed:
            return [one for one in self._ring.get(owner, ()) if one.is_started or not one.is_dropped]

    def take(self) -> list[Entry]:
        """Wait for the next turn: one entry with prefills or none merged, or several with decodes only.

        An entry that has expired, or was cancelled before it started, comes alone. Empty: closed and done.
        """
        with self._changed:
            while True:
                self._discard_dropped()
                if self._ring:
                    break
                if self._closed is not None:
                    return []
                self._changed.wait()
            owner, entries = next(iter(self._ring.items()))
            first = entries[0]
            unit = [first]
            is_alone = first.is_cancelled or first.has_prefills or first.message.no_merge
            if not (first.expires() or is_alone):
                unit += self._companions(first, owner)
            for entry in unit:
                self._waiting -= not entry.is_started
                entry.is_started = True
            return unit

    def end_turn(self, unit: list[Entry], done: Iterable[Entry]) -> None:
        """Forget entries that are done; the sessions of the turn go to the end of the ring."""
        with self._changed:
            for entry in done:
                self._ring[entry.owner].remove(entry)
            for entry in unit:
                if entry.owner in self._ring:
                    if self._ring[entry.owner]:
                        self._ring.move_to_end(entry.owner)
                    else:
                        del self._ring[entry.owner]

    def _companions(self, first: Entry, owner: Sequences) -> Iterator[Entry]:
        """Entries whose decode rows fit into the step of `first`: whole ones, in the order of the ring."""
        room = self._max_rows - len(first.message.decodes)
        for other, entries in self._ring.items():
            stepped: set[int] = set(first.message.sequence_ids) if other is owner else set()
            releases_all = other is owner and any(row.all for row in first.message.releases)
            for place, entry in enumerate(entries):
                if entry is first:
                    continue
                message = entry.message
                ids = message.sequence_ids
                # Behind the session's first entry, only what names other sequences may go with it.
                is_behind = place > 0 and (
                    releases_all or any(row.all for row in message.releases) or not stepped.isdisjoint(ids)
                )
                if (
                    is_behind
                    or entry.has_prefills
                    or message.no_merge
                    or entry.expires()
                    or entry.is_cancelled
                    or entry.is_dropped
                    or len(message.decodes) > room
                ):
                    break
                room -= len(message.decodes)
                stepped |= ids
                releases_all = releases_all or any(row.all for row in message.releases)
                yield entry

    def _discard_dropped(self) -> None:
        """Forget entries that nobody waits for and that have not started: it is as if they never came."""
        for owner, entries in list(self._ring.items()):
            kept = [entry for entry in entries if entry.is_started or not entry.is_dropped]
            self._waiting -= len(entries) - len(kept)
            if not kept:
                del self._ring[owner]
            elif len(kept) < len(entries):
                self._ring[owner] = deque(kept)

    def _entries(self) -> list[Entry]:
        return [entry for entries in self._ring.values() for entry in entries]
