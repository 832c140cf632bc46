"""All rollouts of a filter as columns, for frames. A list of rollouts is a page at a time (`listing`).

Each value that Python takes from SQLite costs time. So the small numbers of a rollout come packed into one, and what is
the same for all siblings is read once for each group.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from rftstream.contracts.rollouts import RolloutStatus
from rftstream.contracts.verdicts import UnscorableReason
from rftstream.queries.audits.rows import RESULTS
from rftstream.queries.catalog.database import CatalogReader
from rftstream.queries.catalog.finding import FATES
from rftstream.queries.catalog.listing import RolloutFilter, select_rollouts
from rftstream.queries.catalog.moments import Moment
from rftstream.queries.catalog.texts import SIBLING_BITS

Numbers = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class CodedWords:
    """A column of words: for each row the number of its word; -1 for none."""

    codes: Numbers
    words: Sequence[str]


_STATUSES, _REASONS = tuple(map(str, RolloutStatus)), tuple(map(str, UnscorableReason))


def _code(column: str, words: Sequence[str]) -> str:
    """Return the number of a column's word from 1 on; 0 for none."""
    cases = " ".join(f"WHEN '{word}' THEN {number}" for number, word in enumerate(words, 1))
    return f"(CASE WHEN {column} IS NULL THEN 0 ELSE CASE {column} {cases} ELSE 0 END END)"


_PACKED = (
    ("status", _code("r.status", _STATUSES), len(_STATUSES) + 1),
    ("unscored", _code("r.unscored", _REASONS), len(_REASONS) + 1),
    ("late", "r.late", 2),
    ("rejected", "(r.rejected IS NOT NULL)", 2),
    ("result", "coalesce(r.fate + 1, 0)", len(RESULTS) + 1),
    ("num_tokens", "coalesce(max(r.num_tokens, 0) + 1, 0)", 1 << 31),
)
"""Name, expression and number of values of the columns that are packed into one, the first at its low end."""
NUMBERS = ("reward", "sampled_at", "verified_at", "decided_at", "rollout_offset", "verified_offset", "version")
"""Columns that are read only if they are asked for."""


def _packed() -> str:
    text, factor = "0", 1
    for _, expression, count in _PACKED:
        text += f" + {factor} * {expression}"
        factor *= count
    return text


def _unpacked(packed: Numbers) -> dict[str, Numbers]:
    found = {}
    for name, _, count in _PACKED:
        packed, found[name] = np.divmod(packed, count)
    return found


def read_columns(
    catalog: CatalogReader,
    moment: Moment,
    wanted: RolloutFilter,
    *,
    order: str = "newest",
    limit: int | None = None,
    names: Sequence[str] = (),
    since: int = 0,
) -> dict[str, Numbers | CodedWords]:
    """Return columns of all rollouts of a filter, as they are now, with those of NUMBERS that `names` has. A value that
    a rollout does not have is not a number, or -1 for an integer. `since`: only of groups from this sequence on."""
    numbers = [name for name in NUMBERS if name in names]
    columns = [f"(r.sequence << {SIBLING_BITS}) + r.sibling", _packed()]
    columns += ["t.version" if name == "version" else f"r.{name}" for name in numbers]
    query, values = select_rollouts(catalog, moment, wanted, ", ".join(columns), order=order, limit=limit, since=since)
    flat = np.fromiter(chain.from_iterable(catalog.each(query, values)), dtype=np.float64)
    keys_of, packed_of, *found = flat.reshape(-1, len(columns)).T
    keys, packed = keys_of.astype(np.int64), _unpacked(packed_of.astype(np.int64))
    sequences = keys >> SIBLING_BITS
    groups = _read_groups(catalog, sequences)
    return {
        "sequence": sequences,
        "sibling": keys & ((1 << SIBLING_BITS) - 1),
        **groups,
        "fate": CodedWords(_fates(packed["result"], groups["batch"], moment), FATES),
        "status": CodedWords(packed["status"] - 1, _STATUSES),
        "num_tokens": packed["num_tokens"] - 1,
        "unscored": CodedWords(packed["unscored"] - 1, _REASONS),
        "rejected": _read_rejected(catalog, keys, packed["rejected"] == 1),
        "late": packed["late"].astype(bool),
        **dict(zip(numbers, found, strict=True)),
    }


def _read_groups(catalog: CatalogReader, sequences: Numbers) -> dict[str, Any]:
    """Return what the groups of rollouts know, for each rollout."""
    wanted = np.unique(sequences)
    rows = catalog.each(
        "SELECT sequence, group_id, taskset, problem, coalesce(batch, -1) FROM json_each(:wanted)"
        " CROSS JOIN groups ON sequence = value ORDER BY json_each.id",
        {"wanted": json.dumps(wanted.tolist())},
    )
    known, ids, tasksets, problems, batches = zip(*rows, strict=True) if len(wanted) else ((), (), (), (), ())
    place = np.searchsorted(np.asarray(known, dtype=np.int64), sequences)
    words = {name: number for number, name in enumerate(dict.fromkeys(tasksets))}
    return {
        "group_id": CodedWords(place, ids),
        "taskset": CodedWords(np.asarray([words[name] for name in tasksets], dtype=np.int64)[place], tuple(words)),
        "problem": np.asarray(problems, dtype=np.int64)[place],
        "batch": np.asarray(batches, dtype=np.int64)[place],
    }


def _read_rejected(catalog: CatalogReader, keys: Numbers, is_rejected: Numbers) -> CodedWords:
    """Return why operators left out the rollouts that they left out."""
    codes = np.full(len(keys), -1)
    if not is_rejected.any():
        return CodedWords(codes, ())
    rows = catalog.rows(
        f"SELECT sequence << {SIBLING_BITS} | sibling AS key, rejected FROM json_each(?) JOIN rollouts"
        f" ON sequence = value >> {SIBLING_BITS} AND sibling = value & {(1 << SIBLING_BITS) - 1}",
        (json.dumps(keys[is_rejected].tolist()),),
    )
    why = {row["key"]: row["rejected"] for row in rows}
    words = sorted(set(why.values()))
    codes[is_rejected] = [words.index(why[key]) for key in keys[is_rejected].tolist()]
    return CodedWords(codes, words)


def _fates(results: Numbers, batches: Numbers, moment: Moment) -> Numbers:
    """Return the numbers of the rollouts' fates in FATES. `results`: their results from 1 on; 0 for none."""
    trained, batched = FATES.index("trained"), FATES.index("batched")
    of_results = np.asarray([FATES.index("pending"), batched, *(FATES.index(str(one)) for one in RESULTS[1:])])
    found = of_results[results]
    is_trained = (found == batched) & (batches >= 0) & (batches < moment.version)
    return np.where(is_trained, trained, found)
