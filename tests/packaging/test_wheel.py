"""The built wheel in environments that know nothing of this checkout."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# As in a shell that knows nothing of this checkout.
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DECODESTEP"))}


def run(*command: str | Path, cwd: Path) -> str:
    done = attempt(*command, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def attempt(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=CLEAN, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def install(folder: Path, what: str) -> Path:
    """A new environment with it; the folder of its programs."""
    venv.create(folder / "env", with_pip=True)
    programs = folder / "env" / "bin"
    run(programs / "pip", "install", "--quiet", what, cwd=folder)
    return programs


def test_the_wheel_holds_what_it_should(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "decodestep/service/server.py",
        "decodestep/accel/executor.py",
        "decodestep/accel/demo_model/model.safetensors",
        "decodestep/client/scheduler.py",
        "decodestep/v1/service_pb2_grpc.py",
        "decodestep/v1/step_pb2.pyi",
    } <= names
    assert not [name for name in names if name.startswith("tests") or "__pycache__" in name]


@pytest.mark.timeout(900)
def test_the_service_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    programs = install(tmp_path, f"{wheel}[server]")
    assert run(programs / "decodestep", "--version", cwd=tmp_path).strip()
    address = f"unix:{tmp_path}/socket"
    server = subprocess.Popen(
        [programs / "decodestep", "serve", "--listen", address, "--num-blocks", "16"],
        cwd=tmp_path,
        env=CLEAN,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr is not None
        for line in server.stderr:
            if "serving" in line.lower():
                break
        arguments = ("--target", address, "--prompt", "It was", "--max-tokens", "3", "--json")
        assert '"finish_reason"' in run(programs / "decodestep", "generate", *arguments, cwd=tmp_path)
        assert "qwen3" in run(programs / "decodestep", "info", "--target", address, cwd=tmp_path).lower()
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
    assert server.returncode == 0


@pytest.mark.timeout(900)
def test_the_bare_wheel_is_the_client(wheel: Path, tmp_path: Path) -> None:
    programs = install(tmp_path, str(wheel))
    installed = run(programs / "pip", "list", "--format=freeze", cwd=tmp_path).lower()
    assert "grpcio" in installed
    assert "torch" not in installed
    assert "numpy" not in installed
    run(programs / "python", "-c", "from decodestep.client.scheduler import Scheduler", cwd=tmp_path)
    done = attempt(programs / "decodestep", "serve", cwd=tmp_path)
    assert done.returncode != 0
    assert "decodestep[server]" in done.stderr
