"""What the tests of the service share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Running


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server for a module."""
    with Running(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def server(shared_server: Running) -> Iterator[Running]:
    """The module's server, empty before a test and after it."""
    shared_server.device.forwards.clear()
    yield shared_server
    shared_server.device.let_go()
    cache = shared_server.executor.table.allocator
    for session in list(shared_server.server._service.sessions._by_key.values()):
        shared_server.stub.Release(
            _all(), metadata=(("decodestep-session", session.name),), timeout=30, wait_for_ready=True
        )
    assert cache.num_free == cache.capacity, "a test or the service has lost blocks"


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Running]]:
    """Start servers with options of their own; they stop with the test."""
    running: list[Running] = []

    def begin(folder: Path | None = None, **options: Any) -> Running:
        running.append(Running(folder or tmp_path_factory.mktemp("server"), **options))
        return running[-1]

    yield begin
    for one in running:
        one.device.let_go()
        one.stop()


def _all() -> Any:
    from decodestep.v1.step_pb2 import ReleaseRequest

    return ReleaseRequest(all=True)
