"""Processes of the backend deepspeed that die at a moment: of which there is a file in the folder that DEATHS names,
with the number of times that a rank gets past it. The file goes with the process."""

import os
import signal
from pathlib import Path

from rftstream.backends.deepspeed import rank
from rftstream.backends.deepspeed.rank_training import Rank
from rftstream.backends.deepspeed.trained import TrainedNetwork

MOMENTS = {
    "open": (Rank, "open"),
    "join": (Rank, "join"),
    "load": (TrainedNetwork, "receive"),
    "pass": (TrainedNetwork, "_backward"),
    "step": (TrainedNetwork, "norm"),
    "look": (Rank, "logprobs"),
    "give": (Rank, "give"),
}
"""Moment -> what the process is about to do."""


def dying(moment, method):
    def call(*args, **settings):
        path = Path(os.environ["DEATHS"]) / moment
        if path.exists():
            left = int(path.read_text())
            if not left:
                path.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            path.write_text(str(left - 1))
        return method(*args, **settings)

    return call


if __name__ == "__main__":
    for moment, (cls, name) in MOMENTS.items():
        setattr(cls, name, dying(moment, getattr(cls, name)))
    rank.main()
