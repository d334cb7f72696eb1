"""The one thread that owns the device: takes turns from the queue, runs them, answers."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

from decodestep.accel.errors import AccelError, RowError
from decodestep.accel.executor import Executor, StepTiming
from decodestep.accel.loader import Engine
from decodestep.service.errors import MessageError
from decodestep.service.messages import Decode, ExecutionReport, ReleaseReport, Report, RowReport
from decodestep.service.rows import Admitted, Rows
from decodestep.service.step_queue import Entry, StepQueue

_log = logging.getLogger(__name__)

_CANCELLED = RowError("CANCELLED", "cancelled")
_NOT_RUN = RowError("DEVICE_FAULT", "not run: the device has failed")
_FAULT = "the device step failed"
_BROKEN = MessageError("DEVICE_BROKEN", "the device has failed")
Answer = Report | MessageError


class DeviceThread(threading.Thread):
    """Loads the model, then runs steps until the queue is closed or the device breaks."""

    def __init__(
        self,
        load: Callable[[], Engine],
        make_queue: Callable[[Engine], StepQueue],
        on_loaded: Callable[[Engine | AccelError], None],
        on_broken: Callable[[], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(name="device", daemon=True)
        self._load = load
        self._make_queue = make_queue
        self._on_loaded = on_loaded
        self._on_broken = on_broken
        self._loop = loop

    def run(self) -> None:
        """Entry point of the thread."""
        try:
            engine = self._load()
        except AccelError as error:
            self._loop.call_soon_threadsafe(self._on_loaded, error)
            return
        queue = self._make_queue(engine)
        self._loop.call_soon_threadsafe(self._on_loaded, engine)
        steps = Steps(engine.executor)
        try:
            while unit := queue.take():
                done = steps.run(unit)
                queue.end_turn(unit, done)
                if done:
                    self._loop.call_soon_threadsafe(_answer, done)
                if steps.is_broken:
                    break
            else:
                return
        except Exception:  # a bug of ours: nothing that this thread holds can be trusted any more
            _log.exception("the device's thread failed")
        broken: dict[Entry, Answer] = dict.fromkeys(queue.break_off(_BROKEN), _BROKEN)
        self._loop.call_soon_threadsafe(_answer, broken)
        self._loop.call_soon_threadsafe(self._on_broken)


def _answer(answers: dict[Entry, Answer]) -> None:
    for entry, answer in answers.items():
        if entry.future.done():
            continue
        if isinstance(answer, MessageError):
            entry.future.set_exception(answer)
        else:
            entry.future.set_result(answer)


class Steps:
    """Runs turns. `is_broken` once the device does not work any more."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._rows = Rows(executor.table)
        self.is_broken = False

    def run(self, unit: list[Entry]) -> dict[Entry, Answer]:
        """Run one turn. Returns the entries that are done, with their answers."""
        first = unit[0]
        if first.has_expired:
            waited = 1000 * (first.message.queue_timeout or 0)
            return {first: MessageError("QUEUE_TIMEOUT", f"not started within {waited:.0f} ms")}
        for entry in unit:
            if not entry.is_open:
                self._open(entry)
        if first.prefills:
            self._prefill(first)
            if first.prefills or (first.message.decodes and not self.is_broken):
                return {}
            # Not reached where the device works; a broken one runs no decode rows any more.
            first.report.decodes = [
                self._rows.refuse(first.owner, row.sequence_id, _NOT_RUN) for row in first.message.decodes
            ]
        else:
            self._decode(unit)
        for entry in unit:
            entry.report.free_blocks = self._executor.table.allocator.num_free
        return {entry: entry.report for entry in unit}

    def _open(self, entry: Entry) -> None:
        """Releases, then blocks for all prefill rows."""
        entry.is_open = True
        report, message = entry.report, entry.message
        report.queue = time.perf_counter() - entry.arrived
        for release in message.releases:
            if entry.is_cancelled:
                report.releases.append(ReleaseReport(release.sequence_id, error=_CANCELLED))
            else:
                report.releases += self._rows.release(entry.owner, release)
        # Filled in by row as they end.
        report.prefills = [_NO_REPORT] * len(message.prefills)
        for index, row in enumerate(message.prefills):
            if entry.is_cancelled or row.sequence_id in entry.cancelled_ids:
                report.prefills[index] = self._rows.refuse(entry.owner, row.sequence_id, _CANCELLED)
                continue
            admitted = self._rows.admit_prefill(entry.owner, row)
            if isinstance(admitted, Admitted):
                entry.prefills[index] = admitted
            else:
                report.prefills[index] = admitted

    def _prefill(self, entry: Entry) -> None:
        """Compute one piece of the entry's prefill rows."""
        report, under_way = entry.report, entry.prefills
        for index, row in list(under_way.items()):
            if entry.is_cancelled or entry.is_dropped or row.sequence_id in entry.cancelled_ids:
                self._executor.settle(row.task)
                report.prefills[index] = self._rows.stop(row, _CANCELLED)
                del under_way[index]
        if not under_way:
            return
        try:
            timing = self._executor.prefill([row.task for row in under_way.values()])
        except Exception as error:  # whatever the device raises
            fault = self._fault(error)
            for index, row in under_way.items():
                report.prefills[index] = self._rows.undo(row, fault)
            under_way.clear()
            return
        _add_timing(report, timing, is_prefill=True)
        for index, row in list(under_way.items()):
            if row.task.done:
                report.prefills[index] = self._rows.finish(row)
                del under_way[index]

    def _decode(self, unit: list[Entry]) -> None:
        """Run the decode rows of all entries in one device step."""
        running: list[tuple[RowReport | None, Entry, Admitted | None]] = []
        tasks = []
        for entry in unit:
            for row in entry.message.decodes:
                admitted = self._admit(entry, row)
                if isinstance(admitted, Admitted):
                    running.append((None, entry, admitted))
                    tasks.append(admitted.task)
                else:
                    running.append((admitted, entry, None))
        fault: RowError | None = None
        if tasks:
            try:
                timing = self._executor.decode(tasks)
            except Exception as error:  # whatever the device raises
                fault = self._fault(error)
            else:
                for entry in unit:
                    _add_timing(entry.report, timing, is_prefill=False)
        for report, entry, running_row in running:
            if running_row is None:
                entry.report.decodes.append(report or _NO_REPORT)
            elif fault is not None:
                entry.report.decodes.append(self._rows.undo(running_row, fault))
            else:
                entry.report.decodes.append(self._rows.finish(running_row))

    def _admit(self, entry: Entry, row: Decode) -> Admitted | RowReport:
        # Decode rows alone are not held up by anything: once taken they run.
        was_stopped = entry.is_dropped and entry.message.prefills
        if entry.is_cancelled or was_stopped or row.sequence_id in entry.cancelled_ids:
            return self._rows.refuse(entry.owner, row.sequence_id, _CANCELLED)
        return self._rows.admit_decode(entry.owner, row)

    def _fault(self, error: Exception) -> RowError:
        """Say what happened, and find out whether the device still works."""
        _log.error("%s", _FAULT, exc_info=error)
        try:
            self._executor.check()
        except Exception:  # whatever the device raises
            _log.exception("the device does not work any more")
            self.is_broken = True
        return RowError("DEVICE_FAULT", f"{_FAULT}: {type(error).__name__}: {error}")


_NO_REPORT = RowReport(0, outcome=None, kv_length=0)  # type: ignore[arg-type]  # replaced before it is read


def _add_timing(report: Report, timing: StepTiming, is_prefill: bool) -> None:
    report.executions.append(ExecutionReport(is_prefill, timing.rows, timing.tokens))
    report.prepare += timing.prepare
    report.device += timing.device
    report.sample += timing.sample
