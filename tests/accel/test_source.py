"""Where a model comes from. The hub is a small HTTP server with the calls that huggingface_hub makes."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from decodestep.accel.config import ModelConfig
from decodestep.accel.errors import ModelError
from decodestep.accel.source import DEMO_FOLDER, resolve_model

FILES = {
    "config.json": b'{"model_type": "qwen3"}',
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "merges.txt": b"a b",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"other weights",
    "README.md": b"# Model",
    "onnx/config.json": b"{}",
}
WANTED = sorted(set(FILES) - {"pytorch_model.bin", "README.md", "onnx/config.json"})
COMMITS = {"main": "a" * 40, "refs/pr/1": "b" * 40}

# huggingface_hub reads its variables when it is imported, so each case has a process of its own.
RESOLVE = """
import sys
from decodestep.accel.errors import ModelError
from decodestep.accel.source import resolve_model
try:
    print(resolve_model(sys.argv[1]))
except ModelError as error:
    sys.exit("\\n".join(error.problems))
"""


@dataclass
class Hub:
    """One repository, org/name, and one that is gated, org/gated."""

    url: str
    requests: list[str] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_GET(self) -> None:
        self.hub.requests.append(self.path)
        match self.path.partition("?")[0].strip("/").replace("%2F", "/").split("/"):
            case ["api", "models", "org", "name", "revision", *revision] if "/".join(revision) in COMMITS:
                self._json({"id": "org/name", "sha": COMMITS["/".join(revision)], "siblings": []})
            case ["api", "models", "org", "name", "revision", *_]:
                self._error(404, "RevisionNotFound")
            case ["api", "models", "org", "name", "tree", *_]:
                self._json([_entry(name, content) for name, content in FILES.items()])
            case ["org", "name", "resolve", commit, *path] if "/".join(path) in FILES:
                self._file(commit, FILES["/".join(path)])
            case ["api", "models", "org", "gated", *_]:
                self._error(403, "GatedRepo")
            case _:
                self._error(404, "RepoNotFound")

    do_HEAD = do_GET  # noqa: N815  (the name that http.server looks for)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _file(self, commit: str, content: bytes) -> None:
        etag = hashlib.sha1(content, usedforsecurity=False).hexdigest()
        self._send(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": commit})

    def _error(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _entry(name: str, content: bytes) -> dict[str, Any]:
    oid = hashlib.sha1(content, usedforsecurity=False).hexdigest()
    return {"type": "file", "path": name, "size": len(content), "oid": oid}


@pytest.fixture
def hub() -> Iterator[Hub]:
    handler = type("Handler", (_Handler,), {})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        handler.hub = Hub(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield handler.hub
        server.shutdown()
        thread.join()


def resolve(
    name: str, home: Path, endpoint: str = "http://127.0.0.1:9", cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Resolve in a process of its own; nothing listens at the default endpoint."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, **variables}
    return subprocess.run(
        [sys.executable, "-c", RESOLVE, name],
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def folder_of(result: subprocess.CompletedProcess[str]) -> Path:
    assert result.returncode == 0, result.stderr
    return Path(result.stdout.strip())


def problem_of(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1
    return result.stderr.strip().splitlines()[-1]


def test_demo_is_the_model_in_the_package() -> None:
    assert ModelConfig.from_folder(resolve_model("demo")).num_hidden_layers == 4
    assert (DEMO_FOLDER / "model.safetensors").exists()


def test_a_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model("~/org") == tmp_path / "org"
    assert resolve_model("org/name").resolve() == tmp_path / "org" / "name"  # wins over the hub
    assert resolve_model("./demo").resolve() == tmp_path / "demo"


def test_a_file_is_refused_naming_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(ModelError, match=f"it is a file: name the folder that holds it, {tmp_path}"):
        resolve_model(str(path))


@pytest.mark.parametrize(
    "name",
    [
        "/no/such",
        "./models/x",
        "../x",
        "~/no-such-model",
        "~no-such-user/x",
        "a/b/c",
        "a/b/",
        "qwen",
        "a b/x",
    ],
)
def test_a_path_that_does_not_exist_is_not_sent_to_the_hub(name: str) -> None:
    with pytest.raises(
        ModelError, match=r"there is no folder /.*: expected demo, a folder or a hub id org/name"
    ):
        resolve_model(name)


def test_fetches_the_files_of_a_model_and_no_others_into_the_cache(hub: Hub, tmp_path: Path) -> None:
    folder = folder_of(resolve("org/name", tmp_path, hub.url))
    assert folder.is_relative_to(tmp_path / "hub")
    found = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert found == {name: FILES[name] for name in WANTED}


@pytest.mark.parametrize("revision", [*COMMITS, "c" * 40])
def test_a_revision_follows_an_at_sign(revision: str, hub: Hub, tmp_path: Path) -> None:
    folder = folder_of(resolve(f"org/name@{revision}", tmp_path, hub.url))
    assert folder.name == COMMITS.get(revision, revision)


def test_the_cache_serves_without_the_hub(hub: Hub, tmp_path: Path) -> None:
    folder = folder_of(resolve("org/name", tmp_path, hub.url))
    assert folder_of(resolve("org/name", tmp_path)) == folder
    hub.requests.clear()
    assert folder_of(resolve("org/name", tmp_path, hub.url, HF_HUB_OFFLINE="1")) == folder
    assert not hub.requests


def test_a_folder_of_the_same_name_wins_over_the_hub(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert folder_of(resolve("org/name", tmp_path, hub.url, cwd=tmp_path)) == Path("org/name")
    assert not hub.requests


def test_says_what_was_tried_and_what_to_do(hub: Hub, tmp_path: Path) -> None:
    def problem(name: str, endpoint: str = hub.url, **variables: str) -> str:
        text = problem_of(resolve(name, tmp_path, endpoint, tmp_path, **variables))
        prefix = f"there is no folder {tmp_path / name}, and "
        assert text.startswith(prefix)
        return text.removeprefix(prefix)

    assert problem("org/none") == (
        f"{hub.url} has no model org/none, or it is private: check the name, or set HF_TOKEN"
    )
    assert problem("org/gated") == (
        f"org/gated on {hub.url} is gated: accept its terms there and set HF_TOKEN"
    )
    assert problem("org/name@v9") == (
        f"org/name on {hub.url} has no revision v9: name a branch, a tag or a commit"
    )
    cache = tmp_path / "hub"
    assert problem("org/name", HF_HUB_OFFLINE="1") == (
        f"org/name is not complete in the cache {cache} and HF_HUB_OFFLINE forbids to fetch it: "
        "unset HF_HUB_OFFLINE, or name a folder"
    )
    unreachable = problem("org/name@main", "http://127.0.0.1:9")
    assert unreachable.startswith(
        f"org/name@main is not complete in the cache {cache} and http://127.0.0.1:9 cannot be reached ("
    )
    assert unreachable.endswith("): connect to it, or name a folder")
    assert problem("org/a..b").startswith(f"fetching org/a..b from {hub.url} failed: Cannot have -- or ..")
