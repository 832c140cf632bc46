"""How each policy gradient learns the small table of table.py: recorded once, in curves.json.

    python -m tests.golden.curves NAME [KEY=VALUE]...

writes the curve of a built-in algorithm with these settings, unless it is there already.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).with_name("curves.json")
RECORDED: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
"""Algorithm, settings, and curve: mean reward of the first and the last five steps, loss of the steps 5 and 20."""
STEPS = 25
LEAST_GAIN = 0.4
"""How much higher the reward has to be in the end."""


def measure(name: str, settings: Mapping[str, Any]) -> tuple[float, float, float, float]:
    """Return the curve that an algorithm has now."""
    from rftstream.config.parts import registry
    from tests.golden import table

    part = registry.resolve("algorithm", name)
    algorithm = part(registry.build_config(part, settings, where=f"algorithms.{name}"))
    steps = list(table.play(algorithm, steps=STEPS))
    rewards = np.asarray([step.reward for step in steps])
    return float(rewards[:5].mean()), float(rewards[-5:].mean()), steps[5].loss, steps[20].loss


def record(name: str, settings: Mapping[str, Any]) -> str:
    """Write the curve of an algorithm, and return what came of it."""
    if any((row["algorithm"], row["settings"]) == (name, settings) for row in RECORDED):
        return f"{name} is recorded with these settings; to record it anew, take its line out of {FILE.name}"
    first, last, *losses = measure(name, settings)
    if last <= first + LEAST_GAIN:
        return f"{name}: reward {first:.2f} became {last:.2f}, expected {LEAST_GAIN} more; give other settings"
    curve = [round(value, 6) for value in (first, last, *losses)]
    rows = [*RECORDED, {"algorithm": name, "settings": settings, "curve": curve}]
    FILE.write_text("[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]\n", encoding="utf-8")
    return f"wrote {name} into {FILE.name}: reward {first:.2f} became {last:.2f}"


if __name__ == "__main__":
    print(record(sys.argv[1], tomllib.loads("\n".join(sys.argv[2:]))))
