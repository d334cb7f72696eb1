"""Drives a server as a scheduler does: prompts come and go, texts appear as they are made."""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import statistics
import sys
import threading
import time
from collections.abc import Sequence

from decodestep.client._channel import DEFAULT_TARGET
from decodestep.client.client import Client
from decodestep.client.errors import ServerRestartedError, ServiceError
from decodestep.client.scheduler import Request, Scheduler
from decodestep.client.text import TextStream
from decodestep.client.types import SamplingParams, ServerInfo, StepResult

_PROMPTS = (
    "In the beginning God created",
    "And the LORD said unto Moses,",
    "The heavens declare the glory of God;",
    "Blessed are the meek:",
    "And it came to pass in those days,",
    "The words of the wise",
    "Now the word of the LORD came unto",
    "And Jesus answered and said unto them,",
    "Praise ye the LORD.",
    "Behold, I send",
    "A soft answer turneth away wrath:",
    "And God said, Let there be",
)
_AT_ONCE = 4  # prompts that are there at the start
_EVERY = 6  # steps: then the next one comes
_LINE = 72  # characters of a text that are shown at once


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo. Returns 0, or 1 if any text failed."""
    parser = argparse.ArgumentParser(prog="python -m decodestep.client.demo", description=__doc__)
    parser.add_argument("--target", default=DEFAULT_TARGET, help="address of the service, %(default)s")
    parser.add_argument("--max-tokens", type=int, default=48, help="of the longest text, %(default)s")
    parser.add_argument("--json", action="store_true", help="print one object instead of texts and a table")
    options = parser.parse_args(arguments)
    try:
        with Client(options.target) as client:
            return _Demo(client, options.max_tokens, options.json).run()
    except (ServiceError, ServerRestartedError) as error:
        print(f"error: {options.target}: {error}", file=sys.stderr)
        return 1


class _Demo:
    def __init__(self, client: Client, max_tokens: int, as_json: bool) -> None:
        self._client = client
        self._max_tokens = max_tokens
        self._as_json = as_json
        self._steps: list[StepResult] = []
        self._requests: list[Request] = []
        self._printer = _Printer(client, is_silent=as_json)

    def run(self) -> int:
        info = self._client.server_info()
        if not self._as_json:
            print(
                f"{info.model.name}: {info.model.num_parameters:,} parameters in {info.model.dtype} on "
                f"{info.device.name}; {info.kv_cache.num_blocks} KV blocks of {info.kv_cache.block_size}\n"
            )
        prompts = [self._client.tokenize(text) for text in _PROMPTS]
        self._printer.start()
        began = time.perf_counter()
        with Scheduler(self._client, on_result=self._steps.append) as scheduler:
            self._drive(scheduler, prompts)
        seconds = time.perf_counter() - began
        self._printer.close()
        self._report(info, seconds)
        failed = [request for request in self._requests if request.error is not None]
        for request in failed:
            print(f"error: prompt {self._requests.index(request) + 1}: {request.error}", file=sys.stderr)
        return 1 if failed else 0

    def _drive(self, scheduler: Scheduler, prompts: list[list[int]]) -> None:
        """Some prompts at once, the others while those run; all lengths; the last one is given up."""
        num_steps = 0
        while True:
            due = min(len(prompts), _AT_ONCE + num_steps // _EVERY)
            while len(self._requests) < due:
                index = len(self._requests)
                request = scheduler.submit(prompts[index], self._sampling(index), self._printer.on_token)
                self._requests.append(request)
                self._printer.begin(request, _PROMPTS[index])
            last = self._requests[-1]
            if len(self._requests) == len(prompts) and len(last.output) >= self._max_tokens // 4:
                scheduler.cancel(last)
            has_more = scheduler.step()
            num_steps += 1
            if not has_more and len(self._requests) == len(prompts):
                return

    def _sampling(self, index: int) -> SamplingParams:
        """Every third is drawn at random, from its own seed; the others are greedy."""
        max_tokens = max(1, self._max_tokens * (3 + index % 4) // 6)
        if index % 3:
            return SamplingParams(max_tokens=max_tokens)
        return SamplingParams(max_tokens=max_tokens, temperature=0.8, top_p=0.95, seed=index)

    def _report(self, info: ServerInfo, seconds: float) -> None:
        latencies = self._latencies()
        num_tokens = sum(len(request.output) for request in self._requests)
        if self._as_json:
            report = {
                "model": info.model.name,
                "dtype": info.model.dtype,
                "device": info.device.name,
                "texts": [
                    {
                        "prompt": prompt,
                        "text": self._printer.texts[request],
                        "token_ids": request.output,
                        "end": _end_of(request),
                    }
                    for prompt, request in zip(_PROMPTS, self._requests, strict=True)
                ],
                "seconds": seconds,
                "steps": len(self._steps),
                "tokens": num_tokens,
                "latency_ms": {
                    name: {"p50": p50, "p99": p99, "count": count} for name, p50, p99, count in latencies
                },
            }
            print(json.dumps(report, ensure_ascii=False))
            return
        print(f"\n{'latency, ms':<34}{'p50':>9}{'p99':>9}{'of':>7}")
        for name, p50, p99, count in latencies:
            print(f"{_LABELS[name]:<34}{p50:>9.2f}{p99:>9.2f}{count:>7}")
        print(
            f"\n{num_tokens} tokens for {len(self._requests)} prompts in {len(self._steps)} steps and "
            f"{seconds:.2f} s: {num_tokens / seconds:.0f} tokens/s"
        )

    def _latencies(self) -> list[tuple[str, float, float, int]]:
        """(name, p50, p99, count), in milliseconds."""
        series: dict[str, list[float]] = {name: [] for name in _LABELS}
        for request in self._requests:
            times = request.token_times
            series["ttft"] += [time - request.submitted for time in times[:1]]
            series["tpot"] += [after - before for before, after in itertools.pairwise(times)]
        for step in self._steps:
            timing = step.timing
            series["step"].append(timing.total)
            series["queue"].append(timing.queue)
            series["host"].append(timing.prepare + timing.task_update + timing.sample)
            series["device"].append(timing.device)
        return [
            (name, 1000 * statistics.median(values), 1000 * _p99(values), len(values))
            for name, values in series.items()
            if values
        ]


_LABELS = {
    "ttft": "time to first token (TTFT)",
    "tpot": "time per output token (TPOT)",
    "step": "step: arrival to answer",
    "queue": "  queue: behind the step before",
    "host": "  host: prepare and sample",
    "device": "  device: forward",
}


def _p99(values: list[float]) -> float:
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, round(0.99 * (len(ranked) - 1)))]


def _end_of(request: Request) -> str:
    if request.error is not None:
        return request.error.reason or request.error.code
    if request.is_cancelled:
        return "CANCELLED"
    return request.finish_reason.name if request.finish_reason is not None else ""


class _Printer:
    """Turns tokens into text beside the scheduler's thread and shows each text line by line as it grows."""

    def __init__(self, client: Client, is_silent: bool) -> None:
        self._client = client
        self._is_silent = is_silent
        self._tokens: queue.SimpleQueue[tuple[Request, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="printer")
        self._streams: dict[Request, TextStream] = {}
        self._lines: dict[Request, str] = {}  # what is not shown yet, of texts that grow
        self._num_printed: dict[Request, int] = {}
        self.texts: dict[Request, str] = {}

    def start(self) -> None:
        self._thread.start()

    def begin(self, request: Request, prompt: str) -> None:
        self._streams[request] = TextStream(self._client)
        self._lines[request] = prompt
        self._num_printed[request] = 0
        self.texts[request] = ""

    def on_token(self, request: Request, token_id: int) -> None:
        self._tokens.put((request, token_id))

    def close(self) -> None:
        self._tokens.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (item := self._tokens.get()) is not None:
            request, token_id = item
            self._add(request, self._streams[request].push([token_id]))
            self._num_printed[request] += 1
            if request.finish_reason is not None and self._num_printed[request] == len(request.output):
                self._end(request)
        for request in list(self._lines):  # what was given up
            self._end(request)

    def _end(self, request: Request) -> None:
        self._add(request, self._streams[request].finish())
        self._show(request, self._lines.pop(request), f"  [{_end_of(request).lower()}]")

    def _add(self, request: Request, text: str) -> None:
        self.texts[request] += text
        line = self._lines[request] + text
        while len(line) > _LINE:
            cut = line.rfind(" ", 0, _LINE) + 1 or _LINE
            self._show(request, line[:cut])
            line = line[cut:]
        self._lines[request] = line

    def _show(self, request: Request, line: str, end: str = "") -> None:
        if not self._is_silent:
            number = list(self._streams).index(request) + 1
            print(f"{number:>3} | {line.rstrip()}{end}".replace("\n", " "), flush=True)


if __name__ == "__main__":
    sys.exit(main())
