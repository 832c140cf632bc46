"""What each benchmark is to reach, and why it does not where it does not.

`make bench` shows the aim of a row and whether it is reached. docs/performance.md has all of them, with what was
measured last (`make bench RECORD=1`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

Side = Literal["at least", "at most"]


@dataclass(frozen=True, slots=True)
class Aim:
    """A bound on one figure of a row. The first aim whose patterns fit a row is the row's."""

    rows: str
    """Pattern of the row's name, as fnmatch has it."""
    side: Side
    bound: float
    of: Literal["ratio", "ours"] = "ratio"
    reference: str = "*"
    """Pattern of the name of what the row is compared with."""
    why_not: str = ""
    """What is in the way, where the aim was missed when it was measured last."""

    def fits(self, row: Mapping[str, Any]) -> bool:
        return fnmatchcase(row["name"], self.rows) and fnmatchcase(row["reference_name"] or "", self.reference)

    def reached(self, row: Mapping[str, Any]) -> bool:
        value = row[self.of]
        return bool(value >= self.bound if self.side == "at least" else value <= self.bound)

    def text(self, row: Mapping[str, Any]) -> str:
        unit = " of the reference" if self.of == "ratio" else f" {row['unit']}".rstrip()
        return f"{self.side} {self.bound:,g}{unit}"


_CODER = "the coder comes near the entropy of its model, so only another model helps (docs/weights-format.md)"
_LONG = (
    "a record is checked where it is written and where it is read, its digest is computed twice, and a batch holds "
    "its rollouts anew"
)
_ECHO = "a call is rendered, tokenised, sampled and committed; an echo does none of that"
_SANDBOX = "each program has a sandbox of its own, which is forked, confined and taken down"

AIMS = (
    Aim("log: 64 KB records*", "at least", 0.8),
    Aim("log: 1 KB records*", "at least", 0.8, why_not="headers are decoded and encoded anew for each record"),
    Aim("kafka: 64 KB records*", "at least", 0.8),
    Aim("kafka: 1 KB records*", "at least", 0.8),
    Aim("kafka: transactions, of one 1 KB record and its position", "at least", 150, of="ours",
        why_not="four round trips, one after the other, and the client's work in Python (decision 17)"),
    Aim("idle: CPU of *", "at most", 2, of="ours"),
    Aim("growth: start of*", "at most", 1.2),
    Aim("growth: status*", "at most", 1.2),
    Aim("growth: dead list*", "at most", 1.2),
    Aim("growth: inspect*", "at most", 1.2),
    Aim("growth: studio*", "at most", 1.2),
    Aim("growth: resume*", "at most", 1.2,
        why_not="one try by the clock; the processor is at 1.08"),
    Aim("recovery: *, embedded", "at most", 5, of="ours"),
    Aim("recovery: *, kafka", "at most", 15, of="ours"),
    Aim("weights: *lr 1e-06*times smaller*", "at least", 750, of="ours", why_not=_CODER),
    Aim("weights: *lr 5e-06*times smaller*", "at least", 420, of="ours", why_not=_CODER),
    Aim("weights: *lr 2e-05*times smaller*", "at least", 145, of="ours", why_not=_CODER),
    Aim("weights: *: bytes", "at least", 0.91),
    Aim("weights: *to publish", "at most", 1, of="ours"),
    Aim("parts: *memory to publish by two", "at most", 1.2, of="ours"),
    Aim("parts: *to publish by two", "at least", 1.8),
    Aim("large: *memory to *", "at most", 1.2),
    Aim("weights: *to apply by two threads", "at most", 0.5, of="ours"),
    Aim("weights: *to apply", "at most", 0.5, of="ours", why_not="each change is decoded bit by bit"),
    Aim("moe: trainer*", "at least", 1),
    Aim("moe: hf*", "at least", 2,
        why_not="products of experts are two fifths of it, and few rows read nearly as many experts as many rows"),
    Aim("hf: *one row alone", "at least", 0.67),
    Aim("hf: *", "at least", 1),
    Aim("vllm: *", "at least", 0.95,
        why_not="two cores carry vLLM's worker, its core, which spins meanwhile, and the explorer; 0.77 to 0.87 when "
                "measured again, where noise was as large"),
    Aim("routing: *, prompt tokens computed", "at most", 1.1, reference="one server alone",
        why_not="a rollout that begins elsewhere, so that no server has too many, computes its prompt once more"),
    Aim("turns: *", "at least", 0.9, why_not="further turns have prompts of their own to compute"),
    Aim("gateway: calls*", "at least", 0.5, why_not=_ECHO),
    Aim("train: *packed", "at least", 1, reference="padded",
        why_not="the same work where rows are of like lengths; the rest is noise"),
    Aim("train: *packed", "at least", 1.5, reference="TRL*"),
    Aim("train: *padded", "at least", 0.97),
    Aim("train: *to a prompt of 512 tokens", "at least", 3.5, reference="packed rows"),
    Aim("train: *to a prompt of 512 tokens", "at least", 8, reference="TRL*",
        why_not="the rows are of one length, so that TRL pads nothing, and packed rows are 1.4 times as fast as its"),
    Aim("train: *of an agent with two forks", "at least", 4),
    Aim("train: *to prompts of 8 tokens", "at least", 0.97),
    Aim("sync_async: times as fast as in turns*", "at least", 2.5, of="ours", reference="aim"),
    Aim("sync_async: groups expired, drop", "at most", 2, of="ours"),
    Aim("long: *a tenth of them*", "at least", 0.5, reference="* alone", why_not=_LONG),
    Aim("long: *", "at least", 0.7, reference="* alone", why_not=_LONG),
    Aim("pipeline: groups of 8 through the feeder", "at least", 0.95,
        why_not="five calls in Python, of 8 us each beside 350 for admitting a group; 0.89 to 0.93 in 36 turns"),
    Aim("pipeline: groups of 8 through the buffer", "at least", 0.95,
        why_not="repetition compares the n-grams of all tokens, while a buffer without operators reads none of them"),
    Aim("pipeline: MinHash*", "at least", 1),
    Aim("trivial program, p50*", "at most", 10, of="ours", why_not=_SANDBOX),
    Aim("trivial program, p95*", "at most", 30, of="ours", why_not=_SANDBOX),
    Aim("trivial programs, on all cores*", "at least", 120, of="ours", why_not=_SANDBOX),
    Aim("python: import*", "at most", 50, of="ours"),
    Aim("python: first page*", "at most", 100, of="ours"),
    Aim("python: to_pandas of *", "at most", 2),
    Aim("python: to_pandas with bodies", "at least", 0.8,
        why_not="beside being decoded, each rollout's texts and tokens are put into columns"),
    Aim("python: a joined *", "at least", 0.9),
    Aim("studio: *first page of a new studio", "at most", 1, of="ours"),
)  # fmt: skip
"""That of programs on all cores is for two of them: 60 a second and core."""


def aim_of(row: Mapping[str, Any]) -> Aim | None:
    return next((aim for aim in AIMS if aim.fits(row)), None)
