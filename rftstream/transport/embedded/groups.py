"""Membership of groups, kept in the log's own tables: the members, and the owner of each partition.

There is no coordinator. Each member writes a heartbeat at intervals. In the same small transaction it removes members
whose heartbeat is older than their session time-out. A member that joins, leaves or removes others assigns the
partitions anew in the same transaction. A partition that changes hands gets the next assignment number. A killed member
is noticed earlier, since its pipe has no reader."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from rftstream.contracts.records import TopicPartition
from rftstream.errors import AssignmentLost
from rftstream.transport.base import Snapshot
from rftstream.transport.embedded.store import Store
from rftstream.transport.embedded.wakeup import is_dead, remove_dead
from rftstream.transport.sharing import share_out


@dataclass(frozen=True, slots=True)
class GroupState:
    """The state of a group from the view of one of its members. `group_state` makes it."""

    generation: int
    """The current generation of the group."""
    peer_pipes: Mapping[int, str]
    """Member number -> path of the pipe, for all members, this one included."""
    assignment: Mapping[TopicPartition, int]
    """Partition of this member -> number of the assignment."""


def join(store: Store, *, group: str, name: str, topics: Collection[str], session_timeout_s: float, pipe: str) -> int:
    """Add a member to the group, assign the partitions anew, and return the member's number.

    Killed members are removed first. So a worker that replaces a killed one gets all of its partitions at once."""
    now_s = store.clock()
    members = store.select("SELECT id, bell FROM members WHERE group_name = ? AND bell != ''", (group,))
    killed = [number for number, bell in members if is_dead(bell)]
    with store.write() as db:
        gone = [*_remove_expired(db, group, now_s), *_remove(db, killed)]
        member = db.execute(
            "INSERT INTO members(group_name, name, topics, heartbeat_s, session_timeout_s, bell)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (group, name, msgspec.msgpack.encode(sorted(topics)), now_s, session_timeout_s, pipe),
        ).lastrowid
        _share_out_anew(db, group)
    store.wakeup_pipes.wake_group(group)
    for killed_pipe in gone:
        remove_dead(killed_pipe)
    assert member is not None
    return member


def leave(store: Store, group: str, member: int) -> None:
    """Remove a member from the group, and assign the partitions anew."""
    put_out(store, group, [member], timeout_s=None)


def put_out(store: Store, group: str, members: Iterable[int], *, timeout_s: float | None) -> None:
    """Remove members from the group, assign the partitions anew, and wake the others. `timeout_s` limits the wait for
    the write lock; None for the store's own limit."""
    with store.write(timeout_s=timeout_s) as db:
        pipes = _remove(db, members)
        if pipes:
            _share_out_anew(db, group)
    _note_gone(store, group, pipes)


def beat(store: Store, group: str, member: int, *, timeout_s: float) -> bool:
    """Record a heartbeat of this member, and remove the members without a heartbeat for their session time-out. Return
    False if this member itself was removed."""
    now_s = store.clock()
    with store.write(timeout_s=timeout_s) as db:
        alive = db.execute("UPDATE members SET heartbeat_s = ? WHERE id = ?", (now_s, member)).rowcount == 1
        pipes = _remove_expired(db, group, now_s) if alive else []
        if pipes:
            _share_out_anew(db, group)
    _note_gone(store, group, pipes)
    return alive


def _note_gone(store: Store, group: str, pipes: Collection[str]) -> None:
    """Wake the rest of the group if members are gone, and remove the pipes of the gone ones."""
    if pipes:
        store.wakeup_pipes.wake_group(group)
        for pipe in pipes:
            remove_dead(pipe)


def generation(store: Store, group: str) -> int:
    """Return the group's generation. The number grows with every change of members or owners."""
    rows = store.select("SELECT generation FROM groups WHERE name = ?", (group,))
    return int(rows[0][0]) if rows else 0


def group_state(store: Store, group: str, member: int) -> GroupState:
    """Return the state of the group as this member sees it, read from one state of the log."""
    with store.read():
        current = generation(store, group)
        pipes = dict(store.select("SELECT id, bell FROM members WHERE group_name = ?", (group,)))
        owned = store.select(
            "SELECT partition_id, number FROM assignments WHERE group_name = ? AND owner = ?", (group, member)
        )
        places = ((store.place(partition_id), number) for partition_id, number in owned)
        assignment = {place: number for place, number in places if place is not None}
    return GroupState(current, pipes, dict(sorted(assignment.items())))


def check_ownership(
    db: sqlite3.Connection, snapshot: Snapshot, partitions: Iterable[tuple[TopicPartition, int]]
) -> None:
    """Raise AssignmentLost unless each partition is still under the snapshot's assignment. Called inside of the
    transaction that commits the positions."""
    for place, partition_id in partitions:
        row = db.execute(
            "SELECT owner, number FROM assignments WHERE group_name = ? AND partition_id = ?",
            (snapshot.group, partition_id),
        ).fetchone()
        number = snapshot.assignment.get(place)
        if row is None or number is None or row != (snapshot.token, number):
            now = "nobody's" if row is None or row[0] is None else f"member {row[0]}'s under assignment {row[1]}"
            raise AssignmentLost(
                f"group {snapshot.group}, {place}: it is {now}, the transaction was made by member {snapshot.token}"
                f" under assignment {number}; drop its work, the owner does it again"
            )


def _remove(db: sqlite3.Connection, members: Iterable[int]) -> list[str]:
    """Remove these members. Return the pipes of those that existed."""
    return [
        row[0]
        for member in members
        for row in db.execute("DELETE FROM members WHERE id = ? RETURNING bell", (member,)).fetchall()
    ]


def _remove_expired(db: sqlite3.Connection, group: str, now_s: float) -> list[str]:
    """Remove the members without a heartbeat for their session time-out, and return their pipes. A heartbeat from the
    future comes from a clock that was set back, and is ignored."""
    return [
        row[0]
        for row in db.execute(
            "DELETE FROM members WHERE group_name = ? AND abs(? - heartbeat_s) > session_timeout_s RETURNING bell",
            (group, now_s),
        ).fetchall()
    ]


def _share_out_anew(db: sqlite3.Connection, group: str) -> None:
    """Assign the partitions to the current members, and begin the next generation."""
    members = {
        member: frozenset(msgspec.msgpack.decode(topics, type=list[str]))
        for member, topics in db.execute("SELECT id, topics FROM members WHERE group_name = ?", (group,))
    }
    subscribed = {topic for topics in members.values() for topic in topics}
    widths = {name: n for name, n in db.execute("SELECT name, partitions FROM topics") if name in subscribed}
    ids: dict[int, TopicPartition] = {
        partition_id: TopicPartition(topic, partition)
        for partition_id, topic, partition in db.execute("SELECT id, topic, partition FROM partitions")
    }
    owners: dict[TopicPartition, int] = {}
    before: dict[int, int | None] = {}
    for partition_id, owner in db.execute("SELECT partition_id, owner FROM assignments WHERE group_name = ?", (group,)):
        before[partition_id] = owner
        if owner is not None and partition_id in ids:
            owners[ids[partition_id]] = owner
    shared = share_out(members, widths, owners)
    db.executemany(
        "INSERT INTO assignments(group_name, partition_id, owner, number) VALUES (?, ?, ?, 1)"
        " ON CONFLICT DO UPDATE SET owner = excluded.owner, number = number + 1",
        [
            (group, partition_id, shared.get(place))
            for partition_id, place in ids.items()
            if before.get(partition_id) != shared.get(place)
        ],
    )
    db.execute("INSERT INTO groups VALUES (?, 1) ON CONFLICT DO UPDATE SET generation = generation + 1", (group,))
