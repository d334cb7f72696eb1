"""The `decodestep` command, which a client-only install has too: there it says what to install."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line. Returns its exit code, or 1 where the [server] extra is not installed."""
    try:
        from decodestep.service.cli import main as run  # noqa: PLC0415

        return run()
    except ModuleNotFoundError as error:
        print(f"error: {error}\nthe command needs more: pip install 'decodestep[server]'", file=sys.stderr)
        return 1
