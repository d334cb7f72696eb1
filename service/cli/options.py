"""Options of the commands that talk to a running service."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from decodestep.service.addresses import Address
from decodestep.service.options import OptionError

_TARGET = Parameter(group=Group.create_ordered("Which service"))
_SAMPLING = Parameter(group=Group.create_ordered("Sampling"))
_COUNT = Parameter(group=_SAMPLING.group, validator=Number(gte=0, lt=2**32))
_SEED = Parameter(group=_SAMPLING.group, validator=Number(gte=0, lt=2**64))
_TOKENS = Parameter(group=_SAMPLING.group, validator=Number(gte=0, lt=2**32), show_default=False)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """Where a running service is."""

    target: Annotated[str | None, _TARGET] = None
    """HOST:PORT, [IPv6]:PORT or unix:/PATH of a running service."""
    tls_root: Annotated[Path | None, _TARGET] = None
    """Talk TLS and trust this certificate or authority, PEM."""
    tls_client_cert: Annotated[Path | None, _TARGET] = None
    """Certificate to show to a service that asks for one, PEM."""
    tls_client_key: Annotated[Path | None, _TARGET] = None
    """Private key of --tls-client-cert, PEM."""

    def __post_init__(self) -> None:
        """Raise OptionError for what cannot be used."""
        if self.target is not None:
            try:
                Address.parse(self.target)
            except ValueError as error:
                raise OptionError("target", self.target, str(error).removeprefix("expected ")) from None
        if (self.tls_client_cert is None) != (self.tls_client_key is None):
            given = "tls_client_cert" if self.tls_client_cert else "tls_client_key"
            raise OptionError(given, getattr(self, given), "--tls-client-cert and --tls-client-key together")
        if self.tls_client_cert is not None and self.tls_root is None:
            raise OptionError("tls_client_cert", self.tls_client_cert, "--tls-root with it")
        for name in ("tls_root", "tls_client_cert", "tls_client_key"):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise OptionError(name, path, "a PEM file that exists")


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen. The service checks the ranges."""

    max_tokens: Annotated[int, _COUNT] = 64
    """Tokens to generate at most, for each prompt."""
    temperature: Annotated[float, _SAMPLING] = 0.0
    """0 takes the most probable token each time."""
    top_k: Annotated[int, _COUNT] = 0
    """Draw among the k most probable tokens. 0: all."""
    top_p: Annotated[float, _SAMPLING] = 1.0
    """Draw among the most probable tokens whose mass reaches this."""
    min_p: Annotated[float, _SAMPLING] = 0.0
    """Draw among tokens at least this many times as probable as the most probable one."""
    seed: Annotated[int | None, _SEED] = None
    """Seed of the random numbers; the same one gives the same text. Default: the service chooses."""
    stop_token_id: Annotated[tuple[int, ...], _TOKENS] = ()
    """Stop at this token; may be given several times."""
    ignore_eos: Annotated[bool, _SAMPLING] = False
    """Go on past the model's own end tokens."""
