"""Tables of `weights` and `batches` without records that are not in force (runtime/inforce.py).

Tables know headers alone, and bodies tell what is foreign. So they are read only where something looks wrong.
"""

from __future__ import annotations

import numpy as np

from rftstream.contracts.control import Trimmed
from rftstream.contracts.records import TopicPartition
from rftstream.queries.ledger import repeated
from rftstream.queries.rows import MANIFEST, UNREADABLE, RowArray, TopicTable
from rftstream.roles.trainer.recorded_batches import foreign_places
from rftstream.service.role import Log


def announcements_in_force(log: Log, table: TopicTable) -> TopicTable:
    """`weights`: what stands there twice may be a copy that somebody else wrote."""
    if not len(repeated(table.rows["key"])):
        return table
    offsets = np.array([record.offset for record, _ in log.in_force("weights")], np.int64)
    return table.where(lambda rows: np.isin(rows["offset"], offsets))


def batches_in_force(log: Log, table: TopicTable, said: Trimmed) -> TopicTable:
    """`batches` from the first batch on that `said` has not deleted."""
    if all(_is_chain(table.rows[table.rows["partition"] == share]) for share in np.unique(table.rows["partition"])):
        return table
    begins = [begin for _, begin in sorted(log.transport.admin.begin_offsets("batches").items())]
    kept = said.offsets.get("batches") or tuple(begins)
    starts = [max(pair) for pair in zip(begins, kept, strict=True)]
    foreign = foreign_places(log.transport, starts, said.version)
    return table.where(
        lambda rows: [
            offset >= starts[partition] and (TopicPartition("batches", partition), offset) not in foreign
            for partition, offset in zip(rows["partition"].tolist(), rows["offset"].tolist(), strict=True)
        ]
    )


def _is_chain(rows: RowArray) -> bool:
    """Whether the records of a share are whole batches, one after the other, as far as headers tell."""
    rows = rows[np.argsort(rows["offset"])]
    is_manifest = rows["kind"] == MANIFEST
    ends = np.flatnonzero(is_manifest)
    if not len(rows) or not is_manifest[-1] or (rows["kind"] == UNREADABLE).any():
        return False
    expected = rows["number"][ends[0]] + np.cumsum(is_manifest) - is_manifest
    sizes = np.diff(ends, prepend=-1) - 1
    follow = bool((rows["number"] == expected).all() and (sizes == rows["count"][ends]).all())
    return follow and not len(repeated(rows["key"]))
