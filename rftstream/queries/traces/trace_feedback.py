"""The part of a trace that is about people: what was asked about a rollout or group, what was said, and what that
changed."""

from __future__ import annotations

from typing import Any

from rftstream.config.sections import RunConfig
from rftstream.contracts.questions import Judgement, Question, VoteEffect
from rftstream.queries.people.feedback import has_feedback, judged_text, read_feedback, vote_text
from rftstream.queries.traces.lineage import Node, Target
from rftstream.service.role import Log


def feedback_nodes(log: Log, config: RunConfig, target: Target) -> list[Node]:
    """Return a node for each question about a rollout or a group that was asked or answered, with its votes."""
    if not has_feedback(log) or (not any(log.ends("feedback").values()) and not any(log.ends("questions").values())):
        return []
    view = read_feedback(log, config)
    nodes: dict[str, Node] = {}

    def node(question_id: str) -> Node:
        return nodes.setdefault(question_id, Node(kind="question", name=question_id))

    for question in view.questions:
        if _is_about(question.rollouts, target):
            node(question.question_id).facts |= _asked(question)
    for line in view.votes:
        vote, judgement = line.vote, line.judgement
        if vote is None or not _is_about(vote.rollouts, target):
            continue
        facts: dict[str, Any] = {"says": vote_text(vote), "by": vote.annotator[:8], "effect": str(judgement.effect)}
        if judgement.effect is VoteEffect.counted:
            facts |= _changed(judgement, recorded=line.recorded)
        child = Node(kind="vote", name=f"revision {vote.revision}", record=line.record, facts=facts)
        node(vote.question_id).children.append(child)
    return list(nodes.values())


def _is_about(rollouts: tuple[str, ...], target: Target) -> bool:
    if target.sibling is not None:
        return f"{target.group_id}/{target.sibling}" in rollouts
    return any(rollout.rpartition("/")[0] == target.group_id for rollout in rollouts)


def _asked(question: Question) -> dict[str, Any]:
    return {"asked for": str(question.reason), "quorum": question.quorum}


def _changed(judgement: Judgement, *, recorded: bool) -> dict[str, Any]:
    """Return how the question stood after a vote, and the batch and version that it came too late for."""
    batch = judgement.batch_sequence
    return {
        "votes": judgement.num_votes,
        "judged": judged_text(judgement),
        "applied": str(judgement.applied),
        "why": judgement.reason or None,
        "batch": batch,
        "version": None if batch is None else f"v{batch + 1}",
        **({} if recorded else {"recorded": False}),
    }
