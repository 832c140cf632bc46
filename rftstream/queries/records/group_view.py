"""A group in readable form: its problem, and all siblings side by side with their completions and rewards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from rftstream.algorithms.by_taskset import ByTaskset, build_algorithm
from rftstream.algorithms.roles import by_role
from rftstream.config.sections import RunConfig
from rftstream.contracts import codec
from rftstream.contracts.batches import BatchManifest, Experience, LossKind
from rftstream.contracts.outcomes import GroupOutcome, OperatorDecision
from rftstream.contracts.records import TopicPartition
from rftstream.contracts.verdicts import Verdict
from rftstream.errors import RftError
from rftstream.queries.catalog.finding import BatchShare, GroupRow, RolloutRow
from rftstream.queries.decoding import message_at
from rftstream.queries.records.rollout_view import ShownMessage, read_rollout
from rftstream.queries.records.shown import PLAIN, CompletionReader
from rftstream.service.reading import each_record
from rftstream.service.role import Log
from rftstream.transport.base import Transport

MAX_SHOWN = 64
"""Most siblings whose records are read for one page."""
SAID_CHARACTERS = 600
"""Most characters of each sibling's last completion."""
MAX_EXPERIENCES = 1024
"""Most experiences of a batch that are read for advantages which depend on the whole batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiblingView:
    """A sibling with the data of its record. `read_group` makes it."""

    row: RolloutRow
    reward: float | None
    parts: Mapping[str, float]
    said: str
    """Its last completion on one line."""
    num_turns: int
    why: str
    """Why it has no reward; empty if it has one."""
    versions: tuple[int, ...]
    """Versions that sampled a token of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """A group with the data of its siblings' records."""

    row: GroupRow
    problem: tuple[ShownMessage, ...]
    answer: str | None
    columns: tuple[tuple[str, str], ...]
    """Names and values of the other columns of the problem."""
    siblings: tuple[SiblingView, ...]
    part_names: tuple[str, ...]
    """Names of the parts and roles that at least one sibling has beside the reward."""
    decisions: tuple[OperatorDecision, ...]
    """Actions of operators on the group."""


def read_group(transport: Transport, group: GroupRow, reader: CompletionReader, *, num_partitions: int) -> GroupView:
    """Read the completions and verdicts of a group's siblings, one record after the other."""
    siblings: list[SiblingView] = []
    problem: tuple[ShownMessage, ...] = ()
    answer = None
    columns: tuple[tuple[str, str], ...] = ()
    for row in group.siblings[:MAX_SHOWN]:
        view = read_rollout(transport, group, row, reader, num_partitions=num_partitions)
        problem, answer = problem or view.problem, answer if answer is not None else view.answer
        columns = columns or view.columns
        said = [turn for turn in view.turns if turn.role == "assistant"]
        reward = row.reward if row.reward is not None else None if view.verdict is None else view.verdict.reward
        siblings.append(
            SiblingView(
                row=row,
                reward=reward,
                parts={} if view.verdict is None else _parts(view.verdict),
                said=reader.one_line(said[-1].pieces, SAID_CHARACTERS) if said else "",
                num_turns=view.num_turns,
                why="" if reward is not None else row.unscored or view.missing or "",
                versions=tuple(sorted({version for _, version in view.sampled_by})),
            )
        )
    names = dict.fromkeys(name for sibling in siblings for name in sibling.parts)
    return GroupView(
        row=group,
        problem=problem,
        answer=answer,
        columns=columns,
        siblings=tuple(siblings),
        part_names=tuple(names) if len(names) > 1 else (),
        decisions=_decisions(transport, group),
    )


def _parts(verdict: Verdict) -> dict[str, float]:
    """Return the parts of a reward, and those rewards of roles that there are."""
    roles = {f"role {role}": reward for role, reward in verdict.roles.items() if reward is not None}
    return {**verdict.parts, **roles}


def read_problem(transport: Transport, group: GroupRow, *, num_partitions: int) -> GroupView:
    """Return a group with its problem only, from its first sibling's record."""
    return read_group(transport, replace(group, siblings=group.siblings[:1]), PLAIN, num_partitions=num_partitions)


def _decisions(transport: Transport, group: GroupRow) -> tuple[OperatorDecision, ...]:
    outcome = message_at(transport, TopicPartition("outcomes", 0), group.outcome_offset, GroupOutcome)
    return () if outcome is None else outcome.decisions


# --------------------------------------------------------------------------------------------- advantages


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantages:
    """Advantages of a group's rollouts. They are computed here, since the log does not have them."""

    by_rollout: Mapping[str, tuple[np.ndarray, ...]]
    """Rollout id -> advantages [T] of the tokens of each segment."""
    experiences: Mapping[str, Experience]
    """Rollout id -> the trained experience, whose reward includes the operators' additions."""
    how: str
    """Text on how they were computed and from what, or why there are none."""


NO_ADVANTAGES = GroupAdvantages(by_rollout={}, experiences={}, how="in no batch, so nothing was trained on it")


def compute_advantages(
    transport: Transport, config: RunConfig, group: GroupRow, shares: list[BatchShare]
) -> GroupAdvantages:
    """Compute the advantages of a group in a batch as the trainer did: with the run's algorithm, from the rewards."""
    if group.batch is None or not shares:
        return NO_ADVANTAGES
    try:
        algorithm = build_algorithm(config)
        in_groups = getattr(algorithm, "needs_spread", "batch") == "group"
        share = next((share for share in shares if _holds(transport, share, group.group_id)), None)
        if share is None:
            return GroupAdvantages(by_rollout={}, experiences={}, how="the batch's records are deleted")
        if not in_groups and share.count > MAX_EXPERIENCES:
            how = f"not computed: they depend on the whole batch, which has more than {MAX_EXPERIENCES:,} rollouts"
            return GroupAdvantages(by_rollout={}, experiences={}, how=how)
        batch = [
            experience
            for experience in _experiences(transport, share, group.group_id if in_groups else None)
            if experience.loss_kind is LossKind.rl and experience.reward is not None
        ]
        if isinstance(algorithm, ByTaskset):
            batch = algorithm.in_order(batch)
        rows, _ = algorithm.prepare(batch)
    except (RftError, ValueError, TypeError, AttributeError) as error:
        return GroupAdvantages(by_rollout={}, experiences={}, how=f"not computed: {error}")
    parts = [part for part in by_role(batch) if part.experience.reward is not None]
    owners = [(part.experience.ids.rollout_id, place) for part in parts for place in part.places]
    if len(owners) != len(rows):
        return GroupAdvantages(by_rollout={}, experiences={}, how="not computed: the algorithm makes rows of its own")
    trained = {owner: row.advantages for owner, row in zip(owners, rows, strict=True)}
    found = {
        one.ids.rollout_id: tuple(
            trained.get((one.ids.rollout_id, place), np.zeros(segment.token_ids.shape[0], np.float32))
            for place, segment in enumerate(one.segments)
        )
        for one in batch
    }
    of = "the rewards of the group" if in_groups else "the rewards of the batch"
    return GroupAdvantages(
        by_rollout=found,
        experiences={one.ids.rollout_id: one for one in batch},
        how=f"computed here by {config.trainer.algorithm} from {of} in batch {group.batch}; they are not on the log",
    )


def _holds(transport: Transport, share: BatchShare, group_id: str) -> bool:
    return any(True for _ in _offsets(transport, share, group_id))


def _experiences(transport: Transport, share: BatchShare, group_id: str | None) -> list[Experience]:
    offsets = list(_offsets(transport, share, group_id))
    found = []
    for record in each_record(transport, TopicPartition("batches", share.share), offsets):
        message = codec.from_record(record)
        if isinstance(message, Experience):
            found.append(message)
    return found


def _offsets(transport: Transport, share: BatchShare, group_id: str | None) -> list[int]:
    """Return the places in a share of a batch's experiences, or of one group's."""
    place = TopicPartition("batches", share.share)
    found = []
    for record in Log(transport).read(
        "batches", start={place: share.begin_offset}, bodies=False, partitions=[share.share]
    ):
        if record.offset >= share.manifest_offset:
            break
        if group_id is None or record.header("group_id") == group_id.encode():
            found.append(record.offset)
    return found


# ---------------------------------------------------- the manifests of a batch, at the places in the catalog


def read_manifests(transport: Transport, shares: Iterable[BatchShare]) -> list[BatchManifest]:
    """Return the manifests of these shares. Deleted ones, and those that cannot be decoded, are left out."""
    places = [(TopicPartition("batches", share.share), share.manifest_offset) for share in shares]
    found = [message_at(transport, place, offset, BatchManifest) for place, offset in places]
    return [manifest for manifest in found if manifest is not None]
