"""A channel to a running service."""

from __future__ import annotations

import grpc

from decodestep.service.addresses import Address
from decodestep.service.cli.options import TargetOptions
from decodestep.service.options import DEFAULT_ADDRESS

_SETTINGS = [
    ("grpc.max_receive_message_length", -1),  # how long answers are is the service's choice
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
]


def open_channel(options: TargetOptions) -> grpc.aio.Channel:
    """A channel to `options.target`, or else to the default address; nothing is sent yet."""
    target = str(Address.parse(options.target or DEFAULT_ADDRESS))
    if options.tls_root is None:
        return grpc.aio.insecure_channel(target, _SETTINGS)
    certificate, key = options.tls_client_cert, options.tls_client_key
    credentials = grpc.ssl_channel_credentials(
        options.tls_root.read_bytes(),
        key.read_bytes() if key else None,
        certificate.read_bytes() if certificate else None,
    )
    return grpc.aio.secure_channel(target, credentials, _SETTINGS)
