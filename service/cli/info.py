"""Says what a running service is and holds."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from typing import Any

import grpc
from google.protobuf.message import Message

from decodestep.service.cli.channel import open_channel
from decodestep.service.cli.failures import explain_rpc
from decodestep.service.cli.options import TargetOptions
from decodestep.service.cli.report import show
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
    show(address, _plain(response), as_json)
    return 0


async def _get_server_info(target: TargetOptions) -> info_pb2.GetServerInfoResponse:
    async with open_channel(target) as channel:
        stub = DecodeStepServiceStub(channel)
        return await stub.GetServerInfo(info_pb2.GetServerInfoRequest(), timeout=_TIMEOUT)


def _plain(message: Message) -> dict[str, Any]:
    """Fields in the order of the proto; protobuf's own JSON has strings for 64-bit integers."""
    report: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if isinstance(value, Message):
            report[field.name] = _plain(value)
        elif isinstance(value, Mapping):
            report[field.name] = dict(value)
        else:
            report[field.name] = value if isinstance(value, str | int | float) else list(value)
    return report
