"""Assignment of partitions to the members of a group. Owners change rarely, and all members get similar numbers.

Every transport uses this rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from rftstream.contracts.records import TopicPartition


def share_out(
    members: Mapping[int, Collection[str]],
    num_partitions: Mapping[str, int],
    owners: Mapping[TopicPartition, int],
) -> dict[TopicPartition, int]:
    """Return the new owner of each partition.

    `members` maps members to their topics, `num_partitions` topics to their numbers of partitions, and `owners`
    partitions to their current owners. Topics with the same subscribers are assigned together: the owner of a partition
    of one topic owns the partitions with the same number of the others. The members' shares of such topics differ by
    one number at most, and a partition changes hands only if necessary. The result is deterministic: ties are broken by
    member number."""
    together: dict[frozenset[int], list[str]] = {}
    for topic in sorted(num_partitions):
        subscribers = frozenset(member for member, topics in members.items() if topic in topics)
        if subscribers:
            together.setdefault(subscribers, []).append(topic)
    shared: dict[TopicPartition, int] = {}
    load: Counter[int] = Counter()
    for subscribers, topics in sorted(together.items(), key=lambda item: item[1]):
        width = max(num_partitions[topic] for topic in topics)
        for number, member in _share_numbers(subscribers, topics, width, owners, load).items():
            for topic in topics:
                if number < num_partitions[topic]:
                    shared[TopicPartition(topic, number)] = member
                    load[member] += 1
    return shared


def _share_numbers(
    subscribers: Collection[int],
    topics: Collection[str],
    width: int,
    owners: Mapping[TopicPartition, int],
    load: Mapping[int, int],
) -> dict[int, int]:
    """Return the member for each partition number, for topics that are assigned together."""
    held: dict[int, list[int]] = {member: [] for member in subscribers}
    for number in range(width):
        so_far: Counter[int] = Counter()
        for topic in topics:
            owner = owners.get(TopicPartition(topic, number))
            if owner is not None and owner in held:
                so_far[owner] += 1
        if so_far:
            # The number stays with the member that owns most of its partitions, and in a tie with the older one.
            held[min(so_far, key=lambda member: (-so_far[member], member))].append(number)
    # Members that hold most now get the larger shares, so that the fewest partitions move.
    ordered = sorted(subscribers, key=lambda member: (-len(held[member]), load.get(member, 0), member))
    base, extra = divmod(width, len(ordered))
    room = {member: base + (index < extra) for index, member in enumerate(ordered)}
    given = {number: member for member in ordered for number in held[member][: room[member]]}
    free = [number for number in range(width) if number not in given]
    for member in ordered:
        while free and room[member] > len(held[member]):
            number = free.pop(0)
            given[number] = member
            held[member].append(number)
    return given
