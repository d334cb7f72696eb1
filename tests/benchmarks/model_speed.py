"""How fast a model is here: against transformers, over the Step stream, in memory, while it loads.

    python tests/benchmarks/model_speed.py                       # a random model of Qwen3-0.6B's shape
    python tests/benchmarks/model_speed.py --model FOLDER compute stream

What is compared runs in turns in one run, and a claim is the ratio of medians: absolute times say more about
the machine, and who else is on it, than about the code.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from decodestep.accel.config import ModelConfig
from decodestep.accel.dtype import choose_dtype
from decodestep.accel.executor import Executor, Task
from decodestep.accel.loader import Settings, load
from decodestep.accel.sampler.params import SamplingParams
from decodestep.accel.sequences import Sequence
from decodestep.client import Client, DecodeRow, PrefillRow, Step
from decodestep.client.types import SamplingParams as ClientSamplingParams

PROMPT = 128
STEPS = 16
BATCHES = (1, 8)
NUM_BLOCKS = 64  # of 32 positions: 8 sequences of 128 + 16 * 5 tokens

Times = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--model", type=Path, help="checkpoint folder; default: random, Qwen3-0.6B's shape")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object in the end")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(unknown)}: take {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory(prefix="model-speed-") as folder:
        model = options.model or _random_checkpoint(Path(folder) / "model")
        results = {part: PARTS[part](model, options.rounds) for part in options.parts or PARTS}
    if options.json:
        print(json.dumps(results))


# compute: prefill and decode against transformers


def compute(model: Path, rounds: int) -> dict[str, float]:
    """Prefill and step, in float32 and in the dtype that `auto` picks, against transformers in float32."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    auto, _ = choose_dtype("auto", ModelConfig.from_folder(model), "cpu")
    dtypes = dict.fromkeys(["float32", str(auto).removeprefix("torch.")])
    executors = {dtype: _executor(model, dtype) for dtype in dtypes}
    ratios: dict[str, float] = {}
    for batch in BATCHES:
        prefills, steps = Times(), Times()
        sides: dict[str, Callable[[np.ndarray], tuple[float, list[float]]]] = {
            "transformers float32": lambda ids: _run_transformers(reference, ids)
        }
        for dtype, executor in executors.items():
            sides[f"decodestep {dtype}"] = lambda ids, executor=executor: _run_executor(executor, ids)
        for turn in range(rounds + 1):  # the first one warms up
            ids = np.random.default_rng(turn).integers(0, reference.config.vocab_size, (batch, PROMPT))
            for side, run in sides.items():
                prefill, side_steps = run(ids)
                if turn > 0:
                    prefills.setdefault(side, []).append(prefill)
                    steps.setdefault(side, []).extend(side_steps)
        base_prefill, base_step = (
            statistics.median(times["transformers float32"]) for times in (prefills, steps)
        )
        for side in sides:
            prefill, step = statistics.median(prefills[side]), statistics.median(steps[side])
            print(
                f"batch {batch}: {side:21} prefill {batch * PROMPT / prefill:6.0f} tok/s "
                f"({base_prefill / prefill:4.2f}x), step {1e3 * step:6.1f} ms ({step / base_step:4.2f}x), "
                f"fastest step {1e3 * min(steps[side]):6.1f} ms",
                flush=True,
            )
            ratios[f"{side}, batch {batch}: prefill speed"] = base_prefill / prefill
            ratios[f"{side}, batch {batch}: step time"] = step / base_step
    return ratios


@torch.inference_mode()
def _run_transformers(model: torch.nn.Module, ids: np.ndarray) -> tuple[float, list[float]]:
    began = time.perf_counter()
    out = model(torch.from_numpy(ids), use_cache=True, logits_to_keep=1)
    prefill = time.perf_counter() - began
    steps = []
    for _ in range(STEPS):
        began = time.perf_counter()
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        out = model(token, past_key_values=out.past_key_values, use_cache=True)
        steps.append(time.perf_counter() - began)
    return prefill, steps


def _run_executor(executor: Executor, ids: np.ndarray) -> tuple[float, list[float]]:
    began = time.perf_counter()
    sequences = [_open(executor, row) for row in ids.astype(np.int32)]
    prefill = time.perf_counter() - began
    steps = _step(executor, sequences, STEPS)
    for sequence in sequences:
        executor.table.close(sequence)
    return prefill, steps


def _executor(model: Path, dtype: str) -> Executor:
    settings = Settings(str(model), dtype=dtype, num_blocks=NUM_BLOCKS, max_sequences=16, max_context=512)
    return load(settings, lambda line: print(line, file=sys.stderr, flush=True)).executor


def _open(executor: Executor, ids: np.ndarray) -> Sequence:
    """Prefill one prompt."""
    sequence = executor.table.open(SamplingParams(ignore_eos=True))
    executor.table.reserve(sequence, len(ids))
    task = Task(sequence, ids)
    while not task.done:
        executor.prefill([task])
    return sequence


def _step(executor: Executor, sequences: list[Sequence], count: int) -> list[float]:
    """Seconds of each of `count` decode steps."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        for sequence in sequences:
            executor.table.reserve(sequence, sequence.length + 1)
        executor.decode([Task(one, np.array([one.pending], dtype=np.int32)) for one in sequences])
        times.append(time.perf_counter() - began)
    return times


# stream: steps over the Step stream against the executor in this process


def stream(model: Path, rounds: int) -> dict[str, float]:
    """Time from answer to answer over the Step stream, two messages ahead, against steps in this process."""
    executor = _executor(model, "auto")
    ratios: dict[str, float] = {}
    with _served(model) as (client, _), client.step_stream() as steps:
        for batch in BATCHES:
            times: defaultdict[str, list[float]] = defaultdict(list)
            for turn in range(rounds + 1):
                prompts = np.random.default_rng(turn).integers(0, 1000, (batch, PROMPT)).astype(np.int32)
                sequences = [_open(executor, prompt) for prompt in prompts]
                here = _step(executor, sequences, 4 * STEPS)
                for sequence in sequences:
                    executor.table.close(sequence)
                over = _steps_over(steps, prompts, 4 * STEPS)
                if turn > 0:
                    times["in-process"] += here
                    times["Step stream"] += over
            for side, values in times.items():
                p50, p99 = np.percentile(values, (50, 99))
                print(
                    f"batch {batch}: {side:11} p50 {1e3 * p50:7.2f} ms, p99 {1e3 * p99:7.2f} ms", flush=True
                )
            for name, measure in (
                ("throughput", np.mean),
                ("at p50", np.median),
                ("at p99", lambda values: np.percentile(values, 99)),
            ):
                ratio = float(measure(times["in-process"]) / measure(times["Step stream"]))
                ratios[f"Step stream, batch {batch}: speed {name}"] = ratio
                print(f"batch {batch}: Step stream over in-process, {name}: {ratio:.3f}", flush=True)
    return ratios


def _steps_over(steps: object, prompts: np.ndarray, count: int) -> list[float]:
    """Seconds from answer to answer of `count` decode steps, then release."""
    ids = range(len(prompts))
    sampling = ClientSamplingParams(ignore_eos=True)
    steps.send(Step(prefills=[PrefillRow(i, prompts[i].tolist(), sampling=sampling) for i in ids]))
    steps.receive()
    step = Step(decodes=[DecodeRow(i) for i in ids])
    for _ in range(3):
        steps.send(step)
    steps.receive()
    times = []
    for left in range(count, 0, -1):
        began = time.perf_counter()
        if left > 2:
            steps.send(step)
        steps.receive()
        times.append(time.perf_counter() - began)
    steps.send(Step(releases=list(ids)))
    steps.receive()
    return times


@contextmanager
def _served(model: Path) -> Iterator[tuple[Client, int]]:
    """A client of a service of its own process, and that process's id."""
    with tempfile.TemporaryDirectory(prefix="model-speed-") as folder:
        address = f"unix:{folder}/socket"
        command = [
            Path(sys.executable).with_name("decodestep"),
            "serve",
            "--model",
            model,
            "--listen",
            address,
        ]
        command += ["--num-blocks", str(NUM_BLOCKS), "--max-context", "512"]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
            try:
                with Client(address, timeout=120) as client:
                    client.server_info()
                    yield client, server.pid
            finally:
                server.terminate()


# memory: of a service that has worked


def memory(model: Path, _: int) -> dict[str, float]:
    """Peak memory of a service, mapped files apart, against weights + KV + 0.4 GB for Python and torch."""
    with _served(model) as (client, pid):
        rng = np.random.default_rng(0)
        client.prefill([PrefillRow(i, rng.integers(0, 1000, 200).tolist()) for i in range(8)])
        for _step_number in range(8):
            client.decode([DecodeRow(i) for i in range(8)])
        info = client.server_info()
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        peak, files = (1024 * int(lines[name].split()[0]) for name in ("VmHWM", "RssFile"))
    kv = info.kv_cache.bytes
    base = info.model.weight_bytes + kv + 0.4e9
    print(
        f"memory: peak {peak / 1e9:.2f} GB, of it mapped files {files / 1e9:.2f}; weights "
        f"{info.model.weight_bytes / 1e9:.2f} + KV {kv / 1e9:.2f} + 0.4: {(peak - files) / base:.2f}x"
    )
    return {"peak memory": (peak - files) / base}


# load: against reading the file and converting it once


def load_time(model: Path, rounds: int) -> dict[str, float]:
    """Loading from a cold cache, against reading the files from one and a pass that converts every tensor."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    dtype, _ = choose_dtype("auto", ModelConfig.from_folder(model), "cpu")
    files = sorted(model.glob("*.safetensors"))
    for _turn in range(rounds):
        _forget(files)
        began = time.perf_counter()
        for file in files:
            with file.open("rb", buffering=0) as source:
                data = bytearray(file.stat().st_size)
                view = memoryview(data)
                while view:
                    view = view[source.readinto(view) :]
        del data, view
        with_conversion = time.perf_counter() - began
        for file in files:
            with safe_open(file, "pt") as tensors:  # in the page cache now
                names = tensors.keys()
                for name in names:
                    tensor = tensors.get_tensor(name)
                    began = time.perf_counter()
                    tensor.to(dtype, copy=True)
                    with_conversion += time.perf_counter() - began
        times["read + convert"].append(with_conversion)
        _forget(files)
        began = time.perf_counter()
        _executor(model, "auto")
        times["load"].append(time.perf_counter() - began)
    medians = {side: statistics.median(values) for side, values in times.items()}
    ratio = medians["load"] / medians["read + convert"]
    print(", ".join(f"{side} {value:.2f} s" for side, value in medians.items()), f"in {dtype}: {ratio:.2f}x")
    return {"load time": ratio}


def _forget(files: list[Path]) -> None:
    """Drop files from the page cache."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _random_checkpoint(folder: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1e6,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


PARTS: dict[str, Callable[[Path, int], dict[str, float]]] = {
    "compute": compute,
    "stream": stream,
    "memory": memory,
    "load": load_time,
}

if __name__ == "__main__":
    main()
