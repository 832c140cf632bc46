"""The manifests of a batch, from where the catalog says they stand."""

from __future__ import annotations

from collections.abc import Iterable

from rftstream.contracts import codec
from rftstream.contracts.batches import BatchManifest
from rftstream.contracts.records import TopicPartition
from rftstream.errors import ContractError
from rftstream.queries.catalog.finding import BatchShare
from rftstream.service.reading import each_record
from rftstream.transport.base import Transport


def read_manifests(transport: Transport, shares: Iterable[BatchShare]) -> list[BatchManifest]:
    """Return the manifests of these shares. Those that were deleted, or cannot be decoded, are left out."""
    found = []
    for share in shares:
        for record in each_record(transport, TopicPartition("batches", share.share), [share.manifest_offset]):
            try:
                message = codec.from_record(record)
            except ContractError:
                continue
            if isinstance(message, BatchManifest):
                found.append(message)
    return found
