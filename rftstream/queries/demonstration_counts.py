"""What became of demonstrations, counted from the log: each use, once a pass, and whether it was trained."""

from __future__ import annotations

from collections import Counter

import numpy as np

from rftstream.queries.balance import STAGES, Balance
from rftstream.queries.formatting import plural
from rftstream.queries.ledger import RolloutRows, Shares, Uses
from rftstream.service.role import Log

NUM_EXAMPLES = 3


def count_demonstrations(
    log: Log, loaded: RolloutRows, uses: Uses, shares: Shares, version: int, *, num_shares: int
) -> tuple[Balance | None, list[str]]:
    """None where none were loaded or used; and each broken promise in a sentence. Uses in batches that retention
    deleted count as manifests that are kept say.

    admitted = as many as the newest manifest counts, and those that went to `dead` instead."""
    there = Counter(batch for _, batch in shares.announced)
    newest = max((batch for batch, count in there.items() if count == num_shares), default=-1)
    total, num_loaded = shares.demonstrations.get(newest, 0), loaded.num_keyed
    if not num_loaded and not len(uses.group_U):
        return None, []
    dead = sum((record.header("id") or b"").startswith(b"buffer/experts/") for record in log.read("dead", bodies=False))
    first = min(shares.demonstrations, default=0)  # what was before it is deleted, and was trained
    before = shares.demonstrations.get(first, 0) - int(np.sum(uses.batch_U == first))
    found = before + int(np.sum(uses.batch_U <= newest))
    trained = shares.demonstrations.get(version - 1, before)
    sentences = []
    if found != total:
        sentences.append(
            f"batches: {plural(found, 'demonstration')} up to batch {newest}, expected {total:,} as its manifest says"
        )
    if uses.num_double:
        sentences.append(f"batches: {plural(uses.num_double, 'demonstration')} a second time in the same pass")
    if foreign := int(np.sum((uses.number_U < 0) | (uses.number_U >= num_loaded))):
        sentences.append(f"batches: {plural(foreign, 'demonstration')} that experts does not have")
    pending = {**dict.fromkeys(STAGES, 0), "batched": found - trained}
    balance = Balance(
        admitted=total + dead, pending_by_stage=pending, trained=trained, expired=0, filtered=0, dead=dead
    )
    return balance, sentences
