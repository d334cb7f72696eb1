"""Every option of the service. One field is a flag, a DECODESTEP_* variable and a YAML key at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter, Token

from decodestep.service.addresses import Address

DEFAULT_ADDRESS = "127.0.0.1:50051"

_UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


class OptionError(ValueError):
    """An option with a value that cannot be used. Says the flag, the value and what was expected."""

    def __init__(self, option: str, value: object, expected: str) -> None:
        self.option = option
        super().__init__(f"{flag(option)} {value}: expected {expected}")


def flag(option: str) -> str:
    """The flag of an option: `max_rows` is `--max-rows`."""
    return "--" + option.replace("_", "-")


def parse_size(text: str) -> int:
    """Bytes of a size such as 2GiB, 512MiB, 1.5GB or 4096. Raises ValueError."""
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size: expected a number of bytes or 512MiB, 2GiB, 1.5GB")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def _convert_size(_type: object, tokens: Sequence[Token]) -> int:
    return parse_size(tokens[0].value)


def _show_size(size: int) -> str:
    return f"{size // 2**20}MiB"


Size = Annotated[int, Parameter(converter=_convert_size, metavar="SIZE", n_tokens=1)]
_MODEL = Parameter(group=Group.create_ordered("Model and device"))
_CACHE = Parameter(group=Group.create_ordered("KV cache and sequences"))
_LISTEN = Parameter(group=Group.create_ordered("Where it listens"))
_LIMITS = Parameter(group=Group.create_ordered("Limits"))
_MESSAGE = Parameter(group=_LIMITS.group, show_default=_show_size)
_ADDRESSES = Parameter(group=_LISTEN.group, show_default=" ".join)

# Inclusive ranges of the numbers. None is let through where the field allows it.
_RANGES: dict[str, tuple[float, float]] = {
    "threads": (1, 4096),
    "kv_cache_memory": (1, 2**50),
    "num_blocks": (1, 2**31 - 1),
    "block_size": (1, 4096),
    "max_sequences": (1, 2**20),
    "max_rows": (1, 2**16),
    "max_prefill_tokens": (1, 2**20),
    "max_context": (1, 2**31 - 1),
    "max_in_flight": (1, 1024),
    "max_queue": (1, 2**20),
    "step_id_window": (1, 2**20),
    "session_idle": (0.1, 1e6),
    "stream_grace": (0, 1e6),
    "max_sessions": (1, 2**20),
    "max_message_size": (2**16, 2**31 - 1),
}


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """What is loaded, where it runs and how much it holds."""

    model: Annotated[str, _MODEL] = "demo"
    """What to serve: a folder, a hub id such as Qwen/Qwen3-0.6B, or demo, which comes with the package."""
    device: Annotated[Literal["cpu", "npu"], _MODEL] = "cpu"
    """Where it runs."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], _MODEL] = "auto"
    """Compute dtype; auto takes the fastest that is right for the device."""
    threads: Annotated[int | None, _MODEL] = None
    """Threads that compute, on a CPU. Default: as torch chooses, one for each physical core."""
    kv_cache_memory: Annotated[Size | None, _CACHE] = None
    """Memory of the KV cache, such as 2GiB. Default: by what is free."""
    num_blocks: Annotated[int | None, _CACHE] = None
    """Size of the KV cache in blocks, instead of --kv-cache-memory."""
    block_size: Annotated[int | None, _CACHE] = None
    """Positions in a block. Default: by the device."""
    max_sequences: Annotated[int, _CACHE] = 256
    """Sequences that can live at once."""
    max_context: Annotated[int | None, _CACHE] = None
    """Positions of a sequence. Default: as the model allows."""

    def __post_init__(self) -> None:
        """Raise OptionError for what cannot be used."""
        _check_ranges(self)
        if not self.model:
            raise OptionError("model", repr(self.model), "a folder, a hub id or demo")
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise OptionError("num_blocks", self.num_blocks, "only one of it and --kv-cache-memory")


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(ModelOptions):
    """Everything that a server can be told."""

    listen: Annotated[tuple[str, ...], _ADDRESSES] = (DEFAULT_ADDRESS,)
    """HOST:PORT, [IPv6]:PORT or unix:/PATH; may be given several times. Port 0 takes any free one."""
    allow_insecure: Annotated[bool, _LISTEN] = False
    """Listen without TLS on addresses that other machines can reach."""
    tls_cert: Annotated[Path | None, _LISTEN] = None
    """Certificate chain of the server, PEM. TLS is for TCP addresses; Unix sockets stay plain."""
    tls_key: Annotated[Path | None, _LISTEN] = None
    """Private key of --tls-cert, PEM."""
    tls_client_ca: Annotated[Path | None, _LISTEN] = None
    """Only let in clients with a certificate of this authority, PEM."""
    max_rows: Annotated[int, _LIMITS] = 64
    """Prefill rows, and decode rows, of one message and of one device step."""
    max_prefill_tokens: Annotated[int | None, _LIMITS] = None
    """Prompt tokens computed in one piece; steps of others run between pieces. Default: by the device."""
    max_in_flight: Annotated[int, _LIMITS] = 8
    """Messages of a Step stream that are read ahead of the answers."""
    max_queue: Annotated[int, _LIMITS] = 256
    """Messages that may wait; unary calls beyond it are refused with RESOURCE_EXHAUSTED."""
    step_id_window: Annotated[int, _LIMITS] = 1024
    """Answers kept for retries, a session."""
    max_sessions: Annotated[int, _LIMITS] = 256
    """Sessions that can live at once."""
    session_idle: Annotated[float, _LIMITS] = 600.0
    """Seconds without a call after which a session without a Step stream ends."""
    stream_grace: Annotated[float, _LIMITS] = 10.0
    """Seconds that a session outlives its Step stream."""
    max_message_size: Annotated[Size, _MESSAGE] = 64 * 2**20
    """Size of one message, either way, such as 64MiB."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe messages that are logged, to stderr."""

    def __post_init__(self) -> None:
        """Raise OptionError for what cannot be used."""
        ModelOptions.__post_init__(self)  # super() does not work in a slotted dataclass
        self._check_tls()
        if not self.listen:
            raise OptionError("listen", "(nothing)", "at least one address")
        addresses = self.addresses
        for text, address in zip(self.listen, addresses, strict=True):
            if addresses.count(address) > 1 and address.port + len(address.path) > 0:
                raise OptionError("listen", text, "each address once")
            if not (address.is_local or self.tls_cert or self.allow_insecure):
                raise OptionError(
                    "listen",
                    text,
                    "a loopback address or a Unix socket, because there is no TLS: give --tls-cert and "
                    "--tls-key, or --allow-insecure if the network is trusted",
                )

    @property
    def addresses(self) -> list[Address]:
        """`listen`, parsed. Raises OptionError."""
        parsed = []
        for text in self.listen:
            try:
                parsed.append(Address.parse(text))
            except ValueError as error:
                raise OptionError("listen", text, str(error).removeprefix("expected ")) from None
        return parsed

    def _check_tls(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("tls_cert", "--tls-key") if self.tls_cert else ("tls_key", "--tls-cert")
            raise OptionError(given, getattr(self, given), f"{missing} with it")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise OptionError("tls_client_ca", self.tls_client_ca, "--tls-cert and --tls-key with it")
        for name in ("tls_cert", "tls_key", "tls_client_ca"):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise OptionError(name, path, "a PEM file that exists")


def _check_ranges(options: ModelOptions) -> None:
    for name, (least, most) in _RANGES.items():
        value = getattr(options, name, None)
        if value is not None and not least <= value <= most:
            raise OptionError(name, value, f"{least:g} to {most:.10g}")
