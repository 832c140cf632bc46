"""Kafka passes the suite, against a real broker; its peers are processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import pytest

from rftstream.config.sections import TransportSection
from rftstream.testing.conformance import ConformanceHarness, TransportConformance, run_peer
from rftstream.transport.base import Transport
from rftstream.transport.kafka.transport import KafkaTransport

pytestmark = [pytest.mark.broker, pytest.mark.law("lost", "twice", "fencing")]


class KafkaHarness(ConformanceHarness):
    session_timeout_s = 2.0
    patience_s = 240.0

    def __init__(self, servers: str, run_id: str, pool: ProcessPoolExecutor) -> None:
        self._connect = partial(KafkaTransport, run_id, TransportSection(kind="kafka", servers=servers))
        self._pool = pool

    def connect(self) -> Transport:
        return self._connect()

    def peers(self, peers: Sequence[tuple[Any, tuple[Any, ...]]]) -> list[Any]:
        running = [self._pool.submit(run_peer, self._connect, peer, arguments) for peer, arguments in peers]
        return [future.result() for future in running]


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(8, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


class TestKafka(TransportConformance):
    @pytest.fixture
    def harness(self, servers: str, run_id: Callable[[], str], pool: ProcessPoolExecutor) -> ConformanceHarness:
        return KafkaHarness(servers, run_id(), pool)
