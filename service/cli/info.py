"""Says what a running service is and holds, or what a model folder would need."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table

from decodestep.accel.errors import ModelError
from decodestep.service.cli.channel import open_channel
from decodestep.service.cli.failures import explain_failure, explain_rpc
from decodestep.service.cli.folder import inspect_folder
from decodestep.service.cli.options import TargetOptions
from decodestep.service.options import DEFAULT_ADDRESS
from decodestep.v1 import info_pb2
from decodestep.v1.service_pb2_grpc import DecodeStepServiceStub

_TIMEOUT = 10.0  # seconds; the service answers this without waiting for its device


def info_of_service(target: TargetOptions, as_json: bool) -> int:
    """Print GetServerInfo of a running service. Returns the exit code."""
    address = target.target or DEFAULT_ADDRESS
    try:
        response = asyncio.run(_get_server_info(target))
    except grpc.aio.AioRpcError as error:
        print(explain_rpc(error, address), file=sys.stderr)
        return 1
    _show(address, _plain(response), as_json)
    return 0


def info_of_model(model: str, as_json: bool) -> int:
    """Print what a model folder holds. Returns the exit code: 1 if it would be refused."""
    try:
        report = inspect_folder(model)
    except ModelError as error:
        print(explain_failure(error), file=sys.stderr)
        return 1
    _show(model, report, as_json)
    return 1 if report["problems"] else 0


async def _get_server_info(target: TargetOptions) -> info_pb2.GetServerInfoResponse:
    async with open_channel(target) as channel:
        stub = DecodeStepServiceStub(channel)
        return await stub.GetServerInfo(info_pb2.GetServerInfoRequest(), timeout=_TIMEOUT)


def _plain(message: info_pb2.GetServerInfoResponse) -> dict[str, Any]:
    """Fields by their proto names, with numbers where protobuf's JSON writes 64-bit integers as strings."""
    report: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    report["model"] |= {
        "num_parameters": message.model.num_parameters,
        "weight_bytes": message.model.weight_bytes,
    }
    report["kv_cache"]["bytes"] = message.kv_cache.bytes
    return report


def _show(title: str, report: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
        return
    console = Console()
    single = {name: value for name, value in report.items() if not isinstance(value, dict)}
    sections = {name: value for name, value in report.items() if isinstance(value, dict)}
    for name, values in {title: single, **sections}.items():
        table = Table(title=name, title_justify="left", title_style="bold", show_header=False, box=None)
        table.add_column(style="dim")
        table.add_column(overflow="fold")
        for key, value in values.items():
            table.add_row(key, _cell(key, value))
        console.print(table)
        console.print()


def _cell(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(key, item)}" for name, item in value.items()) or "-"
    if isinstance(value, list):
        return (
            "\n".join(map(str, value)) if key == "problems" and value else ", ".join(map(str, value)) or "-"
        )
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and "bytes" in key:
        return _readable_bytes(value)
    if isinstance(value, int) and key.startswith("num_"):
        return f"{value:,}"
    return str(value)


def _readable_bytes(size: int) -> str:
    for exponent, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 2**exponent:
            return f"{size / 2**exponent:.2f} {unit}"
    return f"{size} B"
