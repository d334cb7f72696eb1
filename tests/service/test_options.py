"""Options: what each accepts, and what the error for the rest says."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decodestep.service.addresses import Address
from decodestep.service.options import ModelOptions, OptionError, ServeOptions, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("64 B", 64),
        ("2GiB", 2 * 2**30),
        ("512mib", 512 * 2**20),
        ("1.5 GB", 1_500_000_000),
        ("0.5KiB", 512),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 parsec", "2G", "1e9", "0x10", "1,5GB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size: expected"):
        parse_size(text)


@given(st.integers(0, 2**60))
def test_a_number_of_bytes_is_exact(size: int) -> None:
    assert parse_size(str(size)) == size


@pytest.mark.parametrize(
    ("text", "address", "is_local"),
    [
        ("127.0.0.1:50051", Address(host="127.0.0.1", port=50051), True),
        ("localhost:0", Address(host="localhost", port=0), True),
        ("[::1]:7", Address(host="::1", port=7), True),
        ("unix:/run/a.sock", Address(path="/run/a.sock"), True),
        ("unix:///run/a.sock", Address(path="/run/a.sock"), True),
        ("unix:a.sock", Address(path="a.sock"), True),
        ("0.0.0.0:1", Address(host="0.0.0.0", port=1), False),
        ("[::]:1", Address(host="::", port=1), False),
        ("models.example:65535", Address(host="models.example", port=65535), False),
    ],
)
def test_addresses(text: str, address: Address, is_local: bool) -> None:
    assert Address.parse(text) == address
    assert address.is_local is is_local
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("50051", "HOST:PORT"),
        (":50051", "HOST:PORT"),
        ("localhost", "HOST:PORT"),
        ("localhost:65536", "HOST:PORT"),
        ("localhost:http", "HOST:PORT"),
        ("::1:50051", "in brackets"),
        ("[::g]:1", "IPv6 address in the brackets"),
        ("unix:", "path of a socket"),
        ("unix:/run/", "path of a socket"),
        ("unix:/" + "x" * 107, "at most 107 bytes"),
    ],
)
def test_addresses_that_are_none(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Address.parse(text)
    with pytest.raises(OptionError, match=expected) as caught:
        ServeOptions(listen=(text,))
    assert f"--listen {text}: expected" in str(caught.value)


def test_defaults_are_valid() -> None:
    options = ServeOptions()
    assert options.model == "demo"
    assert [str(address) for address in options.addresses] == ["127.0.0.1:50051"]
    assert options.max_message_size == 64 * 2**20
    assert isinstance(options, ModelOptions)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (name, value)
        for name, values in {
            "threads": (0, -1),
            "kv_cache_memory": (0,),
            "num_blocks": (0, 2**31),
            "block_size": (0,),
            "max_sequences": (0,),
            "max_context": (0,),
            "max_rows": (0, 2**16 + 1),
            "max_prefill_tokens": (0,),
            "max_in_flight": (0,),
            "max_queue": (0,),
            "step_id_window": (0,),
            "max_sessions": (0,),
            "session_idle": (0.0, float("nan")),
            "stream_grace": (-1.0, float("inf")),
            "max_message_size": (1024, 2**31),
        }.items()
        for value in values
    ],
)
def test_numbers_out_of_range_name_flag_value_and_range(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=rf"--{name.replace('_', '-')} {value}: expected \S+ to \S+"):
        ServeOptions(**{name: value})


def test_two_sizes_of_the_cache_contradict() -> None:
    with pytest.raises(OptionError, match="--num-blocks 4: expected only one of it and --kv-cache-memory"):
        ModelOptions(num_blocks=4, kv_cache_memory=2**30)


def test_open_addresses_need_tls_or_permission(tmp_path: Path) -> None:
    pem = tmp_path / "x.pem"
    pem.write_text("")
    for address in ("0.0.0.0:1", "[::]:1", "192.0.2.1:1"):
        with pytest.raises(OptionError, match=r"loopback address or a Unix socket.*--allow-insecure"):
            ServeOptions(listen=("unix:/run/a.sock", address))
        assert ServeOptions(listen=(address,), allow_insecure=True).allow_insecure
        assert ServeOptions(listen=(address,), tls_cert=pem, tls_key=pem).tls_cert == pem


def test_an_address_stands_once() -> None:
    with pytest.raises(OptionError, match=r"unix:///run/a: expected each address once"):
        ServeOptions(listen=("unix:///run/a", "unix:/run/a"))
    assert ServeOptions(listen=("127.0.0.1:0", "127.0.0.1:0")).listen  # two free ports
    with pytest.raises(OptionError, match="at least one"):
        ServeOptions(listen=())


def test_tls_files_come_together_and_exist(tmp_path: Path) -> None:
    pem, gone = tmp_path / "x.pem", tmp_path / "gone.pem"
    pem.write_text("")
    for given_, expected in (
        ({"tls_cert": pem}, "--tls-cert .*: expected --tls-key with it"),
        ({"tls_key": pem}, "--tls-key .*: expected --tls-cert with it"),
        ({"tls_client_ca": pem}, "--tls-client-ca .*: expected --tls-cert and --tls-key"),
        ({"tls_cert": pem, "tls_key": gone}, "--tls-key .*gone.pem: expected a PEM file that exists"),
    ):
        with pytest.raises(OptionError, match=expected):
            ServeOptions(**given_)


def test_options_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ServeOptions().model = "other"  # type: ignore[misc]


def test_options_and_help_need_no_torch() -> None:
    code = (
        "import sys\n"
        "from decodestep.service.cli import main\n"
        "assert main(['serve', '--help']) == 0\n"
        "assert not {'torch', 'transformers', 'grpc'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
