"""Every policy gradient learns a small table, along the curve that it learned it along before."""

from __future__ import annotations

from typing import Any

import pytest

from tests.golden.curves import LEAST_GAIN, RECORDED, measure


def name_of(row: dict[str, Any]) -> str:
    return "-".join([row["algorithm"], *(f"{key}={value}" for key, value in row["settings"].items())])


@pytest.mark.sampled(12)
@pytest.mark.slow
@pytest.mark.parametrize("row", RECORDED, ids=name_of)
def test_curve(row: dict[str, Any]) -> None:
    found = measure(row["algorithm"], row["settings"])
    assert found == pytest.approx(row["curve"], rel=1e-3, abs=1e-5)
    assert found[1] > found[0] + LEAST_GAIN
