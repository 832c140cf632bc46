"""Deletes what a committed `Trimmed` record names: records of the log and old checkpoints.

Any reader of such a record may carry it out, at any time and more than once, since nothing that it names is needed. The
trainer does so after it has committed the record. A trainer that starts finishes its predecessor's deletions. `resume`
does so for a run that has ended."""

from __future__ import annotations

from rftstream import faults
from rftstream.contracts.control import Trimmed
from rftstream.contracts.records import TopicPartition
from rftstream.errors import ConfigError, RftError, TransportError, WeightsError
from rftstream.transport.base import Transport
from rftstream.weights.checkpoints import CheckpointStore


def delete_trimmed(
    said: Trimmed, transport: Transport, checkpoints: CheckpointStore, *, compacts: bool
) -> list[RftError]:
    """Delete what the record names, and return why parts of it still exist; empty if all is deleted.

    `said` is the newest record, read from the log or just committed. With `compacts`, the topic `partials` is
    compacted, too."""
    admin = transport.admin
    try:
        # An open transaction may still hide the record from readers who would miss the deleted records.
        admin.end_offsets("control", settled=True)
        admin.make_durable()
    except TransportError as error:
        return [error]
    faults.at("trim_said")
    errors: list[RftError] = []
    for topic, offsets in said.offsets.items():
        try:
            admin.delete_before({TopicPartition(topic, number): offset for number, offset in enumerate(offsets)})
        except (TransportError, ConfigError) as error:  # a ConfigError if rights are missing
            errors.append(error)
    if compacts:
        try:
            admin.compact("partials")
        except TransportError as error:
            errors.append(error)
    faults.at("trim_log_done")
    try:
        for name in checkpoints.older_than(said.name) - set(said.checkpoints):
            checkpoints.delete(name)
    except (WeightsError, ConfigError) as error:
        errors.append(error)
    return errors


def undeleted(said: Trimmed, transport: Transport) -> dict[str, int]:
    """Return topic -> number of offsets that the record names and that are not deleted yet.

    Topics without any are left out."""
    found = {}
    for topic, offsets in said.offsets.items():
        begins = transport.admin.begin_offsets(topic)
        told = {place: offsets[place.partition] for place in begins if place.partition < len(offsets)}
        if count := sum(max(0, offset - begins[place]) for place, offset in told.items()):
            found[topic] = count
    return found
