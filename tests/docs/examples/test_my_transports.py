"""Holds SlowTransport to the promises of rftstream/transport/base.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from my_transports import SlowTransport

from rftstream.config.sections import TransportSection
from rftstream.testing.conformance import ConformanceHarness, TransportConformance, run_in_threads
from rftstream.transport.base import Transport


class SlowHarness(ConformanceHarness):
    def __init__(self, folder: Path) -> None:
        self._section = TransportSection(options={"folder": str(folder), "commit_s": 0.001})

    def connect(self) -> Transport:
        return SlowTransport("run", self._section)

    def peers(self, peers: Sequence[tuple[Any, tuple[Any, ...]]]) -> list[Any]:
        return run_in_threads(self.connect, peers)


@pytest.mark.slow
class TestSlowTransport(TransportConformance):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> ConformanceHarness:
        return SlowHarness(tmp_path)
