from __future__ import annotations

import pytest

from rftstream.backends.deepspeed.rank_processes import Ranks
from tests.unit.backends.kept_ranks import TIMEOUT_S, KeptRanks


@pytest.fixture(scope="module")
def kept():
    """Processes by number, two unless another is asked for; others, if a test has brought them to their end."""
    started = {}

    def ranks(count=2):
        if count not in started or started[count].ended:
            started[count] = KeptRanks(count, threads=1, timeout_s=TIMEOUT_S)
        return started[count]

    yield ranks
    for one in started.values():
        Ranks.end(one)
