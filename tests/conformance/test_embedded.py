"""The embedded log passes the suite; its peers are processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rftstream.testing.conformance import ConformanceHarness, TransportConformance, run_peer
from rftstream.transport.base import Transport
from rftstream.transport.embedded import EmbeddedTransport


class EmbeddedHarness(ConformanceHarness):
    session_timeout_s = 0.6
    wake_up_s = 0.2  # Without bells it would be 0.5 and more; measured 0.001 where nothing else runs.

    def __init__(self, folder: Path, pool: ProcessPoolExecutor) -> None:
        self._folder = folder
        self._pool = pool

    def connect(self) -> Transport:
        return EmbeddedTransport(self._folder)

    def peers(self, peers: Sequence[tuple[Any, tuple[Any, ...]]]) -> list[Any]:
        connect = partial(EmbeddedTransport, self._folder)
        running = [self._pool.submit(run_peer, connect, peer, arguments) for peer, arguments in peers]
        return [future.result() for future in running]


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(8, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


class TestEmbedded(TransportConformance):
    @pytest.fixture
    def harness(self, tmp_path: Path, pool: ProcessPoolExecutor) -> ConformanceHarness:
        return EmbeddedHarness(tmp_path / "log", pool)
