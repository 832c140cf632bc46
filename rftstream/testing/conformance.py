"""The conformance suite for every transport, also yours: the promises of transport/base.py, as tests.

    from rftstream.testing.conformance import ConformanceHarness, TransportConformance

    class TestMine(TransportConformance):
        @pytest.fixture
        def harness(self, tmp_path):
            return MyHarness(tmp_path)

The harness says how to connect, how to run functions in other processes, and how long a session lasts. The tests
compare records, never offsets: offsets may have gaps. They wait for everything that may take a log some time. None is
skipped.
"""

from __future__ import annotations

from rftstream.testing.conformance_tests.admin import AdminConformance
from rftstream.testing.conformance_tests.bench import Bench, ConformanceHarness, run_in_threads, run_peer
from rftstream.testing.conformance_tests.groups import GroupConformance
from rftstream.testing.conformance_tests.reading import ReadingConformance
from rftstream.testing.conformance_tests.together import TogetherConformance
from rftstream.testing.conformance_tests.transactions import TransactionConformance

__all__ = ["Bench", "ConformanceHarness", "TransportConformance", "run_in_threads", "run_peer"]


class TransportConformance(
    ReadingConformance, AdminConformance, TransactionConformance, GroupConformance, TogetherConformance
):
    """All conformance tests. A subclass gives the `harness` fixture, and pytest runs it."""
