"""What an evaluation keeps of its completions: one JSON object a line, in the object store."""

from __future__ import annotations

import json
from typing import Any

from rftstream.contracts.tasks import Problem
from rftstream.models.rendering import Renderer, joined, pieces_of_turns
from rftstream.rewards.base import ScoreReply
from rftstream.roles.explorer.attempt import Attempt


def generation_line(
    key: str, problem: Problem, attempt: Attempt | None, reply: ScoreReply | None, renderer: Renderer
) -> str:
    """Return one sample. `shown` is a turn's text with the special tokens that were sampled, `posted` what the
    environment gave as reward."""
    score = reply.score if reply is not None else None
    if reply is not None:
        reason: Any = reply.reason
    else:
        reason = attempt.error if attempt is not None else None
    turns = attempt.turns if attempt is not None else ()
    shown = pieces_of_turns(renderer, turns, attempt.segments if attempt is not None else ())
    return json.dumps(
        {
            "sample": key,
            "prompt": [{"role": message.role, "content": message.content} for message in problem.messages],
            "answer": problem.answer,
            "completion": [
                {"role": turn.role, "content": turn.content, "shown": joined(pieces)}
                | ({} if turn.reward is None else {"reward": turn.reward})
                for turn, pieces in zip(turns, shown, strict=True)
            ],
            "reward": score.reward if score is not None else None,
            "posted": None if attempt is None or attempt.posted is None else attempt.posted.reward,
            "reason": reason,
            "num_tokens": attempt.num_tokens if attempt is not None else 0,
        },
        ensure_ascii=False,
    )
