"""Runs a server until it is told to stop or its device fails."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from asyncio import FIRST_COMPLETED, create_task

from decodestep.accel.errors import AccelError
from decodestep.service.cli.failures import explain_failure
from decodestep.service.options import ServeOptions
from decodestep.service.server import ListenError, Server


class Reporter:
    """Tells people on stderr what happens, or programs by JSON lines on stdout."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def event(self, event: str, text: str, **fields: object) -> None:
        """One event: `text` for people, name and fields for programs."""
        if self._as_json:
            print(json.dumps({"event": event, **fields}), flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def progress(self, message: str) -> None:
        """Something that people like to see while they wait."""
        self.event("progress", message, message=message)

    def error(self, text: str) -> None:
        """Why the service ends without being told to."""
        self.event("error", text, message=text.removeprefix("error: "))


def serve(options: ServeOptions, as_json: bool) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code: 1 if it could not start or the device failed."""
    logging.basicConfig(
        level=options.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    reporter = Reporter(as_json)
    try:
        return asyncio.run(_serve(options, reporter))
    except (AccelError, ListenError) as error:
        reporter.error(explain_failure(error))
        return 1


async def _serve(options: ServeOptions, reporter: Reporter) -> int:
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)  # the step or the device may hang: do not wait for any thread
        stop.set()
        reporter.event("stopping", "stopping after the step that runs; the same signal again exits at once")

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)

    server = Server(options, reporter.progress)
    for address in await server.start():
        reporter.event("listening", f"listening on {address}", address=address)
    loading = create_task(server.wait_loaded())
    stopping = create_task(stop.wait())
    failing = create_task(server.device_failed.wait())
    try:
        await asyncio.wait((loading, stopping), return_when=FIRST_COMPLETED)
        if loading.done():
            loading.result()
            reporter.event("ready", f"ready: serving {options.model}", model=options.model)
            await asyncio.wait((stopping, failing), return_when=FIRST_COMPLETED)
        if stop.is_set():
            return 0
        reporter.error("error: the device has failed, see the log: start again, or on another device")
        return 1
    finally:
        for task in (loading, stopping, failing):
            task.cancel()
        await server.stop()
        reporter.event("stopped", "stopped")
