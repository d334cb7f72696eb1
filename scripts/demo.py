"""Start a service with the demo model, drive it from a client process, stop it. Fails if any of it fails."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from threading import Thread

STOP_SECONDS = 30


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="decodestep-") as folder:
        address = f"unix:{folder}/decodestep.sock"
        # A session of its own: Ctrl-C reaches this process, which stops the service in order.
        server = subprocess.Popen(
            [Path(sys.executable).with_name("decodestep"), "serve", "--model", "demo", "--listen", address],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        code = 130
        try:
            if code := _drive(server, address):
                print(f"error: the demo failed with exit code {code}", file=sys.stderr)
        except KeyboardInterrupt:
            pass
        finally:
            stopped = _stop(server)
        return code or stopped


def _drive(server: subprocess.Popen[str], address: str) -> int:
    """Wait until the service is ready, then run the client. Returns the exit code of what failed, or 0."""
    assert server.stderr is not None
    for line in server.stderr:
        print(f"service: {line}", end="", file=sys.stderr, flush=True)
        if line.startswith("ready"):
            break
    else:
        return server.wait() or 1
    Thread(target=_show, args=(server.stderr,), daemon=True).start()
    client = [sys.executable, "-m", "decodestep.client.demo", "--target", address]
    return subprocess.run(client, check=False).returncode


def _show(lines: object) -> None:
    for line in lines:
        print(f"service: {line}", end="", file=sys.stderr, flush=True)


def _stop(server: subprocess.Popen[str]) -> int:
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
    try:
        return server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
        print(f"error: the service did not stop within {STOP_SECONDS} s", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
