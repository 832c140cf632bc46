"""A process's time while somebody sets the machine's clock."""

from __future__ import annotations

import time

import pytest

from rftstream.clock import SystemClock

HOUR_S = 3600.0


def test_a_clock_that_is_set_shortens_and_lengthens_no_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine, steady = 1e9, 5.0
    monkeypatch.setattr(time, "time", lambda: machine)
    monkeypatch.setattr(time, "clock_gettime", lambda _: steady)
    clock = SystemClock()
    told = []
    for jump_s, passed_s in (
        (0, 10), (HOUR_S, 10), (0, 100), (-HOUR_S, 10), (0, 1000), (-HOUR_S, 10), (0, 20 * HOUR_S), (0, 10),
    ):  # fmt: skip
        machine, steady = machine + jump_s + passed_s, steady + passed_s
        told.append(clock.now())
    assert [after - before for before, after in zip([1e9, *told], told, strict=False)] == [
        10, 20, 200, 5, 895, 5, 20 * HOUR_S - HOUR_S + 5, 10,
    ]  # fmt: skip
    assert clock.now() == machine
    words = [record.getMessage().partition(";")[0] for record in caplog.records]
    assert words == [f"the clock of this machine was set {where} by 3600 s" for where in ("ahead", "back", "back")]
