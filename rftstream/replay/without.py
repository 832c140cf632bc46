"""Leaves rollouts out of recorded batches: the changes to experiences, manifests and outcomes.

A group with too few remaining rollouts is left out as a whole. Everything else stays as recorded, so the batches keep
their numbers and the groups their places.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from rftstream.contracts import codec
from rftstream.contracts.batches import BatchManifest, Experience
from rftstream.contracts.ids import split_group_id
from rftstream.contracts.outcomes import GroupOutcome, GroupResult
from rftstream.contracts.records import TopicPartition
from rftstream.errors import ConfigError
from rftstream.service.role import Log

REASON = "replay: left out"

Place = tuple[TopicPartition, int]


@dataclass(slots=True)
class _RestOfShare:
    """The remaining experiences of a batch in a share."""

    position: int = 0
    encoded: list[bytes] = field(default_factory=list)
    digest: str = ""
    """Digest of the encoded experiences, set once all are noted."""


class LeftOut:
    """The rollouts and groups that are left out, and the changed records. `find_left_out` makes it. BatchImport calls
    it for each record, in any order and any number of times."""

    def __init__(self, rollouts: frozenset[str], groups: frozenset[str]) -> None:
        self.rollouts = rollouts
        """Rollouts that are left out of groups that stay."""
        self.groups = groups
        """Groups that are left out as a whole."""
        self.batches: dict[int, Counter[str]] = {}
        """Changed batch -> rollouts and groups that it loses."""
        self._positions: dict[Place, int] = {}
        """New positions of the remaining experiences, in changed batches."""
        self._shares: dict[tuple[int, int], _RestOfShare] = {}

    def experience(self, place: Place, experience: Experience) -> Experience | None:
        """Return the changed experience; None if it is left out."""
        if experience.ids.group_id in self.groups or experience.ids.rollout_id in self.rollouts:
            return None
        return replace(experience, position=self._positions.get(place, experience.position))

    def manifest(self, manifest: BatchManifest) -> BatchManifest:
        """Return the changed manifest."""
        batch = manifest.batch_sequence
        lost_before = sum(lost["groups"] for number, lost in self.batches.items() if number <= batch)
        manifest = replace(manifest, total_groups=manifest.total_groups - lost_before)
        if batch not in self.batches:
            return manifest
        groups = tuple(group for group in manifest.groups if group not in self.groups)
        manifest = replace(manifest, groups=groups, num_groups=manifest.num_groups - self.batches[batch]["groups"])
        share = self._shares.get((batch, manifest.share))
        return manifest if share is None else replace(manifest, count=share.position, digest=share.digest)

    def outcome(self, outcome: GroupOutcome) -> GroupOutcome:
        """Return the changed outcome."""
        if outcome.late:
            return outcome
        if outcome.group_id in self.groups:
            return replace(outcome, result=GroupResult.filtered, reason=REASON, batch_sequence=None)
        if not any(rollout.rollout_id in self.rollouts for rollout in outcome.rollouts):
            return outcome
        rollouts = tuple(
            replace(rollout, rejected=REASON) if rollout.rollout_id in self.rollouts else rollout
            for rollout in outcome.rollouts
        )
        return replace(outcome, rollouts=rollouts)

    def note(self, place: Place, experience: Experience) -> None:
        """Add an experience of a changed batch, in order."""
        share = self._shares.setdefault((experience.batch_sequence, experience.share), _RestOfShare())
        if (stays := self.experience(place, replace(experience, position=share.position))) is None:
            return
        self._positions[place] = share.position
        share.position += 1
        share.encoded.append(codec.encode(stays))

    def close(self) -> None:
        """Drop the encoded experiences, after all were noted, except the data that manifests need."""
        for share in self._shares.values():
            share.digest = codec.digest_of_experiences(share.encoded)
            share.encoded.clear()


def find_left_out(
    log: Log,
    names: Collection[str],
    *,
    last: int,
    min_siblings: int,
    foreign: Collection[Place] = (),
    also: Collection[str] = (),
    first: int = 0,
) -> LeftOut:
    """Return the changes for leaving these rollouts, groups and problems out of batches 0 to `last` - 1, and those of
    `also` that are in batches from `first` on. ConfigError if one of `names` is in none of these batches, if a batch
    would be empty, or if nothing is left out."""
    siblings: dict[str, list[str]] = defaultdict(list)
    batch_of: dict[str, int] = {}
    num_groups: Counter[int] = Counter()
    for record in log.read("batches", bodies=False):
        batch, group_id, rollout = record.number("batch_sequence"), record.text("group_id"), record.text("rollout_id")
        if (record.place, record.offset) in foreign or batch is None or batch >= last or not group_id or not rollout:
            continue
        if group_id not in batch_of:
            num_groups[batch] += 1
        siblings[group_id].append(rollout)
        batch_of[group_id] = batch
    dropped = _dropped(names, siblings, last)
    for one in also:
        group = one.rpartition("/")[0]
        if batch_of.get(group, -1) >= first and one in siblings[group]:
            dropped.add(one)
    if not dropped:
        which = f"of versions {first + 1} to {last}" if first else f"below version {last}"
        raise ConfigError(f"the batches {which} hold nothing that is to be left out; nothing would change")
    whole = {
        name
        for name, rollouts in siblings.items()
        if dropped & set(rollouts) and len(set(rollouts) - dropped) < min(min_siblings, len(rollouts))
    }
    left = LeftOut(frozenset(one for one in dropped if one.rpartition("/")[0] not in whole), frozenset(whole))
    for name in dropped:
        left.batches.setdefault(batch_of[name.rpartition("/")[0]], Counter())["rollouts"] += 1
    for name in whole:
        left.batches[batch_of[name]]["groups"] += 1
    if empty := sorted(batch for batch, lost in left.batches.items() if lost["groups"] == num_groups[batch]):
        more = f" and {len(empty) - 1:,} more, up to {empty[-1]}" if empty[1:] else ""
        raise ConfigError(
            f"nothing would be left of batch {empty[0]}{more}, expected at least one group; leave out less, replay "
            "others (--from, --to), or make the batches anew with --pipeline and the run file; `rftstream rescore` "
            "judges all by a mended reward"
        )
    _note_all(log, left, foreign)
    return left


def _dropped(names: Collection[str], siblings: Mapping[str, list[str]], last: int) -> set[str]:
    dropped: set[str] = set()
    of_problem: dict[str, list[str]] = defaultdict(list)
    for group, rollouts in siblings.items():
        if (parts := split_group_id(group)) is not None:
            of_problem[f"{parts[0]}/{parts[2]}"] += rollouts
    for name in names:
        if name in of_problem:
            dropped |= set(of_problem[name])
            continue
        group = name if split_group_id(name) is not None and name in siblings else name.rpartition("/")[0]
        found = siblings[name] if group == name else [one for one in siblings.get(group, ()) if one == name]
        if not found:
            raise ConfigError(
                f"--without: {name}: in none of the batches below version {last}, expected a rollout, group or "
                "problem (TASKSET/NUMBER) that was trained; `rftstream feedback taints RUN` lists what people judge "
                "otherwise, and `rftstream rescore` judges by a mended reward all that was sampled"
            )
        dropped |= set(found)
    return dropped


def _note_all(log: Log, left: LeftOut, foreign: Collection[Place]) -> None:
    for record, message in log.in_force("batches"):
        place = (record.place, record.offset)
        if isinstance(message, Experience) and message.batch_sequence in left.batches and place not in foreign:
            left.note(place, message)
    left.close()
