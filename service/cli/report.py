"""A report as JSON or as tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def show(title: str, report: Mapping[str, Any], as_json: bool) -> None:
    """Print it: as one JSON object, or each dict in it as a table of its own under its name."""
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
        return
    console = Console()
    single = {name: value for name, value in report.items() if not isinstance(value, dict)}
    sections = {name: value for name, value in report.items() if isinstance(value, dict)}
    for name, values in {title: single, **sections}.items():
        console.print(name, style="bold", markup=False, highlight=False)
        table = Table(show_header=False, box=None)
        table.add_column(style="dim")
        table.add_column(overflow="fold")
        for key, value in values.items():
            table.add_row(key, escape(_cell(key if name == title else f"{key} of {name}", value)))
        console.print(table)
        console.print()


def _cell(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(key, item)}" for name, item in value.items()) or "-"
    if isinstance(value, list | tuple):
        return (
            "\n".join(map(str, value)) if key == "problems" and value else ", ".join(map(str, value)) or "-"
        )
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and "bytes" in key:
        return _readable_bytes(value)
    if isinstance(value, int) and key.startswith("num_"):
        return f"{value:,}"
    return str(value) or "-"


def _readable_bytes(size: int) -> str:
    for exponent, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 2**exponent:
            return f"{size / 2**exponent:.2f} {unit}"
    return f"{size} B"
