"""The command line: where options come from, what it prints, how it ends. Real processes, real sockets."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer, Qwen3ForCausalLM

import decodestep.accel
from decodestep.service.cli import app, main
from decodestep.service.cli.options import SamplingOptions, TargetOptions
from decodestep.service.options import ModelOptions, ServeOptions

DEMO = Path(decodestep.accel.__file__).parent / "demo_model"
PROMPTS = ["In the beginning", "And the LORD said unto Moses,", "The heavens declare"]
COMMAND = [sys.executable, "-m", "decodestep.service.cli"]
SMALL = ["--num-blocks", "64", "--threads", "1", "--dtype", "float32"]


def run(*arguments: str, stdin: str = "", timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], input=stdin, capture_output=True, text=True, timeout=timeout, check=False
    )


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def parse(*arguments: str) -> dict[str, Any]:
    """The arguments that the command would be called with."""
    _, bound, *_ = app.parse_args(arguments)
    return dict(bound.arguments)


class Service:
    """`decodestep serve --json` in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "serve", "--json", *arguments],
            stdout=PIPE,
            stderr=PIPE,
            text=True,
        )
        self.events: list[dict[str, Any]] = []

    def read_until(self, event: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))
            if self.events[-1]["event"] == event:
                return self.events[-1]
        raise AssertionError(f"ended without {event}: {self.events}, {self.process.communicate()[1]}")

    def end(self, number: int) -> tuple[int, list[str], str]:
        """Send a signal; exit code, names of the remaining events, and stderr."""
        self.process.send_signal(number)
        rest, errors = self.process.communicate(timeout=30)
        return self.process.returncode, [event["event"] for event in objects(rest)], errors


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Addresses of a running service with the demo model: `tcp` and `unix`."""
    path = tmp_path_factory.mktemp("service") / "socket"
    running = Service("--listen", "127.0.0.1:0", "--listen", f"unix:{path}", *SMALL)
    running.read_until("ready")
    tcp, unix = [event["address"] for event in running.events if event["event"] == "listening"]
    yield {"tcp": tcp, "unix": unix}
    code, _, errors = running.end(signal.SIGTERM)
    assert code == 0, errors


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[list[int], str]]:
    """24 greedy tokens and their text after each of PROMPTS, by transformers in float32."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    model = Qwen3ForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    results = {}
    for prompt in PROMPTS:
        given = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**given, max_new_tokens=24, do_sample=False)[0, given["input_ids"].shape[1] :]
        results[prompt] = (ids.tolist(), tokenizer.decode(ids, skip_special_tokens=True))
    return results


# Options


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "decodestep.yaml"
    path.write_text(
        "max_rows: 7\nkv-cache-memory: 2GiB\nlisten: [127.0.0.1:1, '[::1]:2']\nsession_idle: 1.5\n"
        "allow_insecure: yes\ntemperature: 0.5\ntarget: 127.0.0.1:9\n"
    )
    return path


def test_flags_go_before_environment_before_file_before_default(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert parse("serve") == {}
    options = parse("serve", "--config", str(config))["options"]
    assert options == ServeOptions(
        max_rows=7,
        kv_cache_memory=2 * 2**30,
        listen=("127.0.0.1:1", "[::1]:2"),
        session_idle=1.5,
        allow_insecure=True,
    )
    monkeypatch.setenv("DECODESTEP_CONFIG", str(config))
    monkeypatch.setenv("DECODESTEP_LISTEN", "unix:/run/a 127.0.0.1:3")
    monkeypatch.setenv("DECODESTEP_MAX_ROWS", "8")
    monkeypatch.setenv("DECODESTEP_ALLOW_INSECURE", "false")
    options = parse("serve", "--max-rows", "9", "--model", "/models/x")["options"]
    assert options == ServeOptions(
        max_rows=9,
        kv_cache_memory=2 * 2**30,
        listen=("unix:/run/a", "127.0.0.1:3"),
        session_idle=1.5,
        model="/models/x",
    )


def test_one_file_and_environment_serve_all_commands(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODESTEP_MODEL", "/models/x")
    monkeypatch.setenv("DECODESTEP_PORT", "tcp://10.0.0.1:50051")  # what Kubernetes sets
    arguments = parse("generate", "--config", str(config), "--prompt", "a b", "--prompt", "- c")
    assert arguments["prompt"] == ("a b", "- c")
    assert arguments["model"] == ModelOptions(model="/models/x", kv_cache_memory=2 * 2**30)
    assert arguments["sampling"] == SamplingOptions(temperature=0.5)
    assert arguments["target"] == TargetOptions(target="127.0.0.1:9")


def test_a_prompt_from_the_environment_is_one_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODESTEP_PROMPT", "In the beginning")
    assert parse("generate")["prompt"] == ("In the beginning",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--max-rows", "0"], "--max-rows 0: expected 1 to 65536"),
        (["serve", "--max-rows", "many"], '--max-rows: unable to convert "many" into int'),
        (["serve", "--dtype", "int8"], 'Choose from: "auto", "float32"'),
        (["serve", "--kv-cache-memory", "2 parsecs"], "'2 parsecs' is not a size: expected"),
        (["serve", "--listen", "0.0.0.0:50051"], "--listen 0.0.0.0:50051: expected a loopback address"),
        (["serve", "--max-row", "1"], "--max-row"),
        (["serve", "extra"], "extra"),
        (["serve", "--config", "/does/not/exist"], "--config /does/not/exist: expected a YAML file"),
        (["generate"], "--prompt"),
        (["generate", "--prompt", ""], "--prompt '': expected a text that is not empty"),
        (["generate", "--prompt", "x", "--target", "nowhere"], "--target nowhere: expected HOST:PORT"),
        (["generate", "--prompt", "x", "--seed", "-1"], "--seed"),
        (["generate", "--prompt", "x", "--stop-token-id", "4294967296"], "--stop-token-id"),
        (["info", "--tls-client-cert", "x"], "--tls-client-cert x: expected"),
        (["bake"], "bake"),
    ],
)
def test_wrong_use_says_what_and_exits_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_rowz: 1\nmodel: demo\n", "expected keys that are options, but no command has max_rowz"),
        ("max_rows: [1, 2]\n", "max-rows"),
        ("max_rows: 0\n", "--max-rows 0: expected 1 to 65536"),
        ("- max_rows\n", "expected `option: value` lines"),
        ("a: [\n", "expected YAML"),
    ],
)
def test_a_wrong_file_says_what(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    assert main(["serve", "--config", str(path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "generate", "info"])
def test_help_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert command in capsys.readouterr().out
    assert main([command, "--help"]) == 0
    help_ = capsys.readouterr().out
    assert f"decodestep {command}" in help_.partition("For example:")[2]
    assert "DECODESTEP_MAX_ROWS=32" in help_


# Errors that are not wrong use


def test_nothing_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        target = f"127.0.0.1:{free.getsockname()[1]}"
    for arguments in (["info"], ["generate", "--prompt", "x"]):
        assert main([*arguments, "--target", target]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"error: {target}: UNAVAILABLE: ")
        assert "start `decodestep serve` there" in err


def test_a_service_that_cannot_start_says_why(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for arguments, message in (
            (["--listen", address], address),
            (["--listen", f"unix:{tmp_path}/s", "--model", f"{tmp_path}/gone"], "gone"),
        ):
            result = run("serve", *arguments, *SMALL)
            assert result.returncode == 1
            assert "error: " in result.stderr
            assert message in result.stderr
            assert "Traceback" not in result.stderr
            result = run("serve", "--json", *arguments, *SMALL)
            assert result.returncode == 1
            assert message in next(e["message"] for e in objects(result.stdout) if e["event"] == "error")


def test_generate_says_why_its_own_service_cannot_start(tmp_path: Path) -> None:
    result = run("generate", "--prompt", "x", "--model", str(tmp_path / "gone"))
    assert (result.returncode, result.stdout) == (1, "")
    assert "gone" in result.stderr
    assert "Traceback" not in result.stderr


# serve


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_says_where_it_listens_and_ends_cleanly(number: int, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    running = Service("--listen", "127.0.0.1:0", "--listen", f"unix:{path}", *SMALL)
    running.read_until("ready")
    names = [event["event"] for event in running.events]
    assert names[:2] == ["listening", "listening"]
    assert set(names[2:-1]) <= {"progress"}
    assert running.events[0]["address"].startswith("127.0.0.1:")
    assert running.events[1]["address"] == f"unix:{path}"
    code, events, errors = running.end(number)
    assert (code, events) == (0, ["stopping", "stopped"]), errors
    assert "Traceback" not in errors
    assert not path.exists()


def test_serve_ends_cleanly_while_it_loads(tmp_path: Path) -> None:
    running = Service("--listen", f"unix:{tmp_path}/socket", *SMALL)
    running.read_until("listening")
    code, events, errors = running.end(signal.SIGTERM)
    assert code == 0, errors
    assert events[-1] == "stopped"
    assert "Traceback" not in errors


def test_serve_ends_cleanly_while_it_generates(tmp_path: Path) -> None:
    running = Service("--listen", f"unix:{tmp_path}/socket", *SMALL)
    running.read_until("ready")
    target = ["--target", f"unix:{tmp_path}/socket"]
    client = subprocess.Popen(
        [*COMMAND, "generate", *target, "--prompt", "And", "--max-tokens", "2000", "--ignore-eos"],
        stdout=PIPE,
        stderr=PIPE,
    )
    assert client.stdout is not None
    assert client.stdout.read(1)
    code, events, errors = running.end(signal.SIGTERM)
    assert (code, events) == (0, ["stopping", "stopped"]), errors
    _, client_errors = client.communicate(timeout=30)
    assert client.returncode == 1
    assert b"UNAVAILABLE SHUTTING_DOWN" in client_errors


def test_people_read_stderr(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "serve", "--listen", f"unix:{tmp_path}/socket", *SMALL],
        stdout=PIPE,
        stderr=PIPE,
        text=True,
    )
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("ready"):
            break
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "")
    assert lines[0] == f"listening on unix:{tmp_path}/socket\n"
    assert lines[-1] == "ready: serving demo\n"


# generate


@pytest.mark.parametrize("address", ["tcp", "unix"])
def test_generate_gives_the_tokens_of_transformers_in_order(
    service: dict[str, str], expected: dict[str, tuple[list[int], str]], address: str
) -> None:
    prompts = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    target = ["--target", service[address], "--json"]
    result = run("generate", *target, *prompts, "--max-tokens", "24", "--temperature", "0")
    assert result.returncode == 0, result.stderr
    continuations = objects(result.stdout)
    assert [continuation["prompt"] for continuation in continuations] == PROMPTS
    for continuation in continuations:
        token_ids, text = expected[continuation["prompt"]]
        assert continuation["token_ids"] == token_ids
        assert continuation["text"] == text
        assert continuation["finish_reason"] == "LENGTH"
        assert continuation["num_prompt_tokens"] > 0


def test_generate_starts_a_service_of_its_own(expected: dict[str, tuple[list[int], str]]) -> None:
    prompt = PROMPTS[0]
    result = run("generate", "--prompt", prompt, "--max-tokens", "24", *SMALL)
    assert result.returncode == 0, result.stderr
    assert result.stdout == expected[prompt][1] + "\n"


def test_a_prompt_from_stdin(service: dict[str, str], expected: dict[str, tuple[list[int], str]]) -> None:
    prompt = PROMPTS[1]
    target = ["--target", service["unix"]]
    result = run("generate", *target, "--prompt", "-", "--max-tokens", "24", stdin=prompt + "\n")
    assert (result.returncode, result.stdout) == (0, expected[prompt][1] + "\n"), result.stderr


def test_a_seed_makes_texts_the_same(service: dict[str, str]) -> None:
    sampled = ["generate", "--target", service["unix"], "--json", "--temperature", "1.5", "--top-k", "50"]
    prompts = ["--prompt", "Blessed are the", "--prompt", "Blessed are the", "--max-tokens", "16"]
    first, second = objects(run(*sampled, *prompts, "--seed", "7").stdout)
    assert first == second
    assert first["seed"] == 7
    first, second = objects(run(*sampled, *prompts).stdout)
    assert first["token_ids"] != second["token_ids"]
    again = objects(run(*sampled, *prompts, "--seed", str(first["seed"])).stdout)[0]
    assert again == first


def test_finish_reasons(service: dict[str, str]) -> None:
    newline = AutoTokenizer.from_pretrained(DEMO).encode("\n")
    assert len(newline) == 1
    prompt = ["--json", "--prompt", PROMPTS[0]]
    target = ["--target", service["unix"]]
    stopped = objects(
        run("generate", *target, *prompt, "--max-tokens", "500", "--stop-token-id", str(newline[0])).stdout
    )[0]
    assert stopped["finish_reason"] == "STOP"
    assert stopped["token_ids"][-1] == newline[0]
    full = objects(run("generate", *prompt, "--max-tokens", "500", "--max-context", "32", *SMALL).stdout)[0]
    assert full["finish_reason"] == "CONTEXT"


def test_an_error_of_the_service_names_reason_and_field(service: dict[str, str]) -> None:
    result = run("generate", "--target", service["tcp"], "--prompt", "x", "--temperature", "1000")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: {service['tcp']}: INVALID_ARGUMENT INVALID_")
    assert "sampling.temperature" in result.stderr
    result = run("generate", "--target", service["tcp"], "--prompt", "x", "--chat")
    assert result.returncode == 1
    assert "FAILED_PRECONDITION NO_CHAT_TEMPLATE" in result.stderr


def test_several_prompts_are_shown_in_order(service: dict[str, str]) -> None:
    prompts = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    result = run("generate", "--target", service["unix"], *prompts, "--max-tokens", "4")
    places = [result.stdout.index(f"> {prompt}\n") for prompt in PROMPTS]
    assert places == sorted(places)


# info


def test_info_of_a_service(service: dict[str, str]) -> None:
    result = run("info", "--target", service["tcp"], "--json", "--model", "ignored")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["model"]["name"] == "demo"
    assert report["model"]["vocab_size"] == 2048
    assert report["model"]["num_parameters"] == count_parameters()
    assert report["kv_cache"]["num_blocks"] == report["kv_cache"]["free_blocks"] == 64
    assert report["limits"]["max_rows"] == 64
    shown = run("info", "--target", service["unix"])
    assert shown.returncode == 0
    assert report["instance_id"] in shown.stdout


def count_parameters() -> int:
    with safe_open(DEMO / "model.safetensors", framework="pt") as file:
        return sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118


def test_info_of_a_folder() -> None:
    result = run("info", "--model", "demo", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["config"]["num_hidden_layers"] == 4
    assert report["weights"]["num_parameters"] == count_parameters()
    assert report["weights"]["bytes_by_dtype"] == {"BF16": 2 * count_parameters()}
    assert report["kv_bytes_per_token"]["float32"] == 2 * 4 * 2 * 64 * 4
    assert (report["has_tokenizer"], report["problems"]) == (True, [])
    shown = run("info", "--model", str(DEMO))
    assert shown.returncode == 0
    assert "2.00 KiB" in shown.stdout  # of KV in bfloat16, a token


def test_info_names_what_would_be_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-100])
    result = run("info", "--model", str(folder), "--json")
    assert result.returncode == 1
    problems = "\n".join(json.loads(result.stdout)["problems"])
    assert "Qwen3MoeForCausalLM" in problems or "qwen3_moe" in problems
    assert "model.safetensors" in problems
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    result = run("info", "--model", str(folder))
    assert result.returncode == 1
    assert "model-00002-of-00002.safetensors" in result.stdout


def test_info_of_no_folder(tmp_path: Path) -> None:
    result = run("info", "--model", str(tmp_path / "gone"))
    assert result.returncode == 1
    assert "gone" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        result = subprocess.run(
            [*COMMAND, "info", "--model", "demo"],
            stdout=write,
            stderr=PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(write)
    assert "Traceback" not in result.stderr
