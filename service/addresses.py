"""Addresses as people write them: host:port, [::1]:port and unix:/path."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

MAX_UNIX_PATH = 107  # bytes: sun_path of sockaddr_un less the final zero


@dataclass(frozen=True, slots=True)
class Address:
    """Either a host with a port (0: any free one) or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read an address. Raises ValueError saying what was expected."""
        if text.startswith("unix:"):
            path = text.removeprefix("unix:")
            path = "/" + path.lstrip("/") if path.startswith("//") else path
            if not path.strip("/") or path.endswith("/"):
                raise ValueError("unix: needs the path of a socket, such as unix:/run/decodestep.sock")
            if len(path.encode()) > MAX_UNIX_PATH:
                raise ValueError(f"the path of a Unix socket has at most {MAX_UNIX_PATH} bytes")
            return cls(path=path)
        host, colon, port = text.rpartition(":")
        if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
            raise ValueError("expected HOST:PORT, [IPv6]:PORT or unix:/PATH")
        if host.startswith("[") and host.endswith("]"):
            try:
                ipaddress.IPv6Address(host[1:-1])
            except ValueError:
                raise ValueError("expected an IPv6 address in the brackets") from None
            host = host[1:-1]
        elif ":" in host:
            raise ValueError("an IPv6 address stands in brackets: [::1]:50051")
        return cls(host=host, port=int(port))

    @property
    def is_unix(self) -> bool:
        """Whether it is a Unix socket."""
        return bool(self.path)

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it: a Unix socket or a loopback address."""
        if self.is_unix or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        """The form that gRPC takes, for servers and channels alike."""
        if self.is_unix:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
