"""Seeds played in processes of their own; what of it goes back is small."""

from __future__ import annotations

import gc
import logging
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from rftstream.contracts import codec
from rftstream.testing import Simulation
from tests.simulation.grid import check_seed, simulate


@dataclass(frozen=True, slots=True)
class Played:
    seed: int
    num_ticks: int = 0
    happened: Counter[str] = field(default_factory=Counter)
    error: str = ""
    """With the story of the run. Empty if all laws held."""
    story: str = ""


def prepare(verbose: bool) -> None:
    if verbose:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    else:
        logging.disable(logging.CRITICAL)
    gc.freeze()  # what the imports made is not looked through again and again
    codec.decode = lru_cache(maxsize=4096)(codec.decode)  # type: ignore[assignment]  # each record has many readers


def play(seed: int, *, calm: bool, verbose: bool, **kinds: bool) -> Played:
    try:
        simulation = _run(seed, calm=calm, **kinds)
    except Exception:
        return Played(seed, error=traceback.format_exc())
    story = simulation.to_text() if verbose else ""
    return Played(seed, simulation.num_ticks, simulation.plan.happened, story=story)


def _run(seed: int, *, calm: bool, **more: bool) -> Simulation:
    with tempfile.TemporaryDirectory() as folder:
        if calm:
            return simulate(seed, Path(folder), calm=True, **more)[0]
        return check_seed(seed, Path(folder), **more)
