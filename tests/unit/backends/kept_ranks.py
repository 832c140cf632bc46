"""Processes of the backend deepspeed that serve one backend after another: a process takes seconds to start."""

from __future__ import annotations

from rftstream.backends.deepspeed.rank_processes import Ranks

TIMEOUT_S = 250.0


class KeptRanks(Ranks):
    """Ranks that a backend cannot end; `Ranks.end` does."""

    def end(self):
        pass
