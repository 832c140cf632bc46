"""Training data from people's judgements: preference pairs and corrected answers, as rows for `experts load`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from rftstream.contracts.feedback import PairChoice
from rftstream.contracts.questions import Applied, Judgement
from rftstream.contracts.rollouts import Rollout
from rftstream.contracts.tasks import ChatMessage
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.queries.people.feedback import FeedbackView
from rftstream.queries.plain import chat_row
from rftstream.service.role import Log

Row = dict[str, Any]


def preference_rows(log: Log, view: FeedbackView) -> Iterator[Row]:
    """Yield a row with prompt, chosen and rejected for each pair with a better side."""
    judged = [judgement for judgement in view.judgements.values() if judgement.applied is Applied.pair]
    rollouts = _rollouts(log, {name for one in judged for name in one.rollouts})
    for one in judged:
        first, second = (rollouts.get(name) for name in one.rollouts)
        if first is None or second is None or _said(first) == _said(second):
            continue  # retention deleted them, or neither is preferred
        better, worse = (first, second) if one.choice is PairChoice.first else (second, first)
        yield {"prompt": _prompt(first), "chosen": _said(better), "rejected": _said(worse), **_of(one, first)}


def demonstration_rows(log: Log, view: FeedbackView) -> Iterator[Row]:
    """Yield a chat for each corrected answer in force: the rollout's prompt, and the correction."""
    judged = [judgement for judgement in view.judgements.values() if judgement.correction is not None]
    votes = {line.vote.feedback_id: line.vote for line in view.votes if line.vote is not None}
    rollouts = _rollouts(log, {one.rollouts[0] for one in judged})
    for one in judged:
        rollout, vote = rollouts.get(one.rollouts[0]), votes.get(one.correction or "")
        if rollout is None or vote is None or vote.correction is None:
            continue
        answer = ChatMessage(role="assistant", content=vote.correction)
        before = [*_prompt(rollout), *_said(rollout)[:-1]]  # with several turns, the last one is corrected
        yield {"messages": [*before, chat_row(answer)], **_of(one, rollout)}


def _of(judgement: Judgement, rollout: Rollout) -> Row:
    assert rollout.problem is not None, "it was judged"
    row: Row = {
        "question_id": judgement.question_id,
        "rollouts": list(judgement.rollouts),
        "num_votes": judgement.num_votes,
        "agreement": judgement.agreement,
    }
    if rollout.problem.tools:
        row["tools"] = [dict(tool) for tool in rollout.problem.tools]
    return row


def _rollouts(log: Log, wanted: set[str]) -> dict[str, Rollout]:
    """Return those of the wanted rollouts that can be read and have a text."""
    found: dict[str, Rollout] = {}
    if not wanted:
        return found
    for _, message in log.in_force("verified"):
        if isinstance(message, VerifiedRollout) and message.ids.rollout_id in wanted:
            rollout = message.rollout
            if rollout is not None and rollout.problem is not None and rollout.turns:
                found[message.ids.rollout_id] = rollout
    return found


def _prompt(rollout: Rollout) -> list[Row]:
    assert rollout.problem is not None, "others are left out"
    return [chat_row(message) for message in rollout.problem.messages]


def _said(rollout: Rollout) -> list[Row]:
    """Return the messages after the prompt."""
    return [
        {
            "role": turn.role,
            "content": turn.content,
            **({"tool_calls": msgspec.to_builtins(turn.tool_calls)} if turn.tool_calls else {}),
        }
        for turn in rollout.turns
    ]
