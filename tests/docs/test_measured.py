"""Tables of what was measured: from rows by hand."""

from __future__ import annotations

from typing import Any

from pages import measured

from scripts import side_by_side
from scripts.experiments import EXPERIMENTS


def row(name: str, seed: int, last: float, *, first: float = 0.02, stale: float = 0.0) -> dict[str, Any]:
    digest = next(one.digest for one in EXPERIMENTS if one.name == name)
    return {"name": name, "seed": seed, "of": digest, "held_out": [first, last], "staleness": [stale, 3.0]}


def line(table: str, name: str) -> list[str]:
    (found,) = (text for text in table.splitlines() if text.startswith(f"| {name} |"))
    return [cell.strip() for cell in found.strip("|").split("|")][1:]


def test_algorithms() -> None:
    table = measured.algorithms([
        row("algorithms/grpo", 0, 0.96), row("algorithms/grpo", 1, 0.85), row("algorithms/grpo", 2, 0.9),
        row("algorithms/ppo", 1, 0.79), row("algorithms/topr", 0, 0.9, first=0.2),
        {**row("algorithms/gspo", 0, 0.9), "of": "00000000"},
    ])  # fmt: skip
    no = measured.NOT_YET
    assert line(table, "`grpo`") == ["-", "0.02 → 0.96", "0.02 → 0.85", "0.02 → 0.90", "3 of 3"]
    assert line(table, "`ppo`") == ["`critic.lr = 0.004`", no, "0.02 → 0.79", no, "0 of 1"]
    assert line(table, "`topr`")[-1] == "0 of 1", "it came from too high"
    assert line(table, "`gspo`") == ["-", no, no, no, "-"], "measured with other settings"


def test_staleness() -> None:
    table = measured.staleness([
        row("staleness/0/decoupled", 0, 0.9), row("staleness/0/decoupled", 1, 0.95),
        row("staleness/8/decoupled", 1, 0.94, stale=6.25), row("staleness/8/decoupled", 2, 0.5, stale=7.75),
        row("staleness/8/plain", 0, 0.4, stale=7.9),
    ])  # fmt: skip
    no = measured.NOT_YET
    assert line(table, "0") == [no, "0.925 (0.90, 0.95)", "-", "+0.0", "-, 0.0"]
    found = line(table, "8")
    assert found == ["0.40", "0.720 (0.94, 0.50)", "-50.0", "-1.0", "7.9, 7.0"], "points of the seeds of both"
    assert line(table, "16") == [no, no, "-", "-", "-, -"]


def test_beside_trl() -> None:
    def of(side: str, seed: int, *curve: list[float]) -> dict[str, Any]:
        return {"name": one.name, "side": side, "seed": seed, "of": one.digest(side), "curve": [*map(list, curve)]}

    one = side_by_side.ARITHMETIC
    ours = of("rftstream", 0, [0, 9.4, 0.0], [10, 20.2, 0.84], [20, 30.0, 0.96])
    table = measured.beside_trl(one, [ours, of("rftstream", 1, [0, 9.0, 0.0], [20, 31.0, 0.5])])
    assert "| 0 | rftstream | 9 | 20 | 10 | 30 | 0.96 |" in table
    assert f"| 0 | trl | {measured.NOT_YET} | - | - | - | - |" in table
    assert "| 1 | rftstream | 9 | never | - | 31 | 0.50 |" in table
    assert "trl.png" not in table
    assert "(pictures/trl.png)" in measured.beside_trl(one, [of(side, 0, *ours["curve"]) for side in one.sides])
    other = measured.beside_trl_smollm2([{**ours, "name": "trl-smollm2"}])
    assert measured.NOT_YET in other and "| 0 | rftstream | 9 |" not in other, "of other settings"
