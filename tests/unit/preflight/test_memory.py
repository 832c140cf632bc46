"""What a device needs that a trainer and engines have one after the other."""

from __future__ import annotations

from rftstream.preflight.memory import MAIN, MemoryEstimate, RoleMemory


def test_a_device_in_turns_needs_what_the_larger_of_them_needs():
    roles = (
        RoleMemory(role="trainer", count=1, parts={"cuda:0": {"weights": 70}, MAIN: {"process": 5}}),
        RoleMemory(role="explorer", count=2, parts={"cuda:0": {"weights": 20, "cache": 5}, MAIN: {"process": 5}}),
    )
    there = {"cuda:0": 80}
    together = MemoryEstimate(roles=roles, machine=there)
    in_turns = MemoryEstimate(roles=roles, machine=there, in_turns="cuda:0")
    assert (together.total("cuda:0"), in_turns.total("cuda:0")) == (120, 70)
    assert together.total(MAIN) == in_turns.total(MAIN) == 15
    assert (together.too_much, in_turns.too_much) == (["cuda:0"], [])
