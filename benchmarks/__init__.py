"""Measurements beside references, run by hand: `make bench`, or `python -m benchmarks NAME ...`.

A module here with `run() -> list[dict]` is a benchmark of its own name; those that begin with _ serve several. A row:
name, unit, ours, reference, reference_name, ratio (None where there is nothing to compare with).
"""
