"""Processes of the backend deepspeed that serve one backend after another: a process takes seconds to start."""

import gc
import importlib

from rftstream.backends.deepspeed import rank
from rftstream.backends.deepspeed.engine import import_deepspeed
from rftstream.backends.deepspeed.rank_processes import Ranks

TIMEOUT_S = 250.0


class KeptRanks(Ranks):
    """Ranks that a backend cannot end; `Ranks.end` does."""

    module = "tests.unit.backends.kept_ranks"

    def end(self):
        pass


def import_for_good():
    """Import all that backends need. Each backend that closes looks through all objects for what is free, and need not
    look through these."""
    importlib.import_module("transformers.models.llama.modeling_llama")
    import_deepspeed("cpu")
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    import_for_good()
    rank.main()
