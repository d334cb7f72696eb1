"""Says what a running service is and holds."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict

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
