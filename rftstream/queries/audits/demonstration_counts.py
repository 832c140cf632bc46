"""What became of demonstrations, counted from the log: each use, once a pass, and whether it was trained."""

from __future__ import annotations

from rftstream.queries.audits.balance import STAGES, Balance
from rftstream.queries.facts.database import Index
from rftstream.queries.formatting import plural
from rftstream.service.role import Log


def count_demonstrations(index: Index, log: Log, version: int, *, num_shares: int) -> tuple[Balance | None, list[str]]:
    """None where none were loaded or used; and each broken promise in a sentence. Uses in batches that retention
    deleted count as manifests that are kept say.

    admitted = as many as the newest manifest counts, and those that went to `dead` instead."""

    def up_to(batch: int, otherwise: int = 0) -> int:
        """Return how many were used up to a batch, as its manifest says."""
        found = list(index.rows("SELECT experts FROM manifests WHERE number = ? ORDER BY partition DESC, offset DESC",
                                (batch,)))  # fmt: skip
        return int(found[0][0]) if found else otherwise

    num_loaded = index.number("SELECT count(DISTINCT key) FROM keyed WHERE topic = 'experts'")
    if not num_loaded and not index.number("SELECT count(*) FROM demonstrations_used"):
        return None, []
    newest = index.number(
        "SELECT coalesce(max(number), -1) FROM (SELECT number FROM manifests GROUP BY number"
        " HAVING count(DISTINCT share) = ?)",
        (num_shares,),
    )
    total = up_to(newest)
    dead = sum((record.header("id") or b"").startswith(b"buffer/experts/") for record in log.read("dead", bodies=False))
    first = index.number("SELECT min(number) FROM manifests")  # what was before it is deleted, and was trained
    before = up_to(first) - index.number("SELECT count(*) FROM demonstrations_used WHERE batch = ?", (first,))
    found = before + index.number("SELECT count(*) FROM demonstrations_used WHERE batch <= ?", (newest,))
    trained = up_to(version - 1, before)
    sentences = []
    if found != total:
        sentences.append(
            f"batches: {plural(found, 'demonstration')} up to batch {newest}, expected {total:,} as its manifest says"
        )
    double = "SELECT 1 FROM all_batches WHERE kind = 1 GROUP BY grp, number"
    once = "SELECT 1 FROM demonstrations_used"
    if num_double := index.number(f"SELECT (SELECT count(*) FROM ({double})) - (SELECT count(*) FROM ({once}))"):
        sentences.append(f"batches: {plural(num_double, 'demonstration')} a second time in the same pass")
    strangers = "SELECT count(*) FROM demonstrations_used WHERE number < 0 OR number >= ?"
    if foreign := index.number(strangers, (num_loaded,)):
        sentences.append(f"batches: {plural(foreign, 'demonstration')} that experts does not have")
    pending = {**dict.fromkeys(STAGES, 0), "batched": found - trained}
    balance = Balance(
        admitted=total + dead, pending_by_stage=pending, trained=trained, expired=0, filtered=0, dead=dead
    )
    return balance, sentences
