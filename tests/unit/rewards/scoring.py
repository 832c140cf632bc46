"""Items scored as a verifier does it, by a scorer with children or in this process."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import closing
from typing import Any

from rftstream.rewards.base import RewardInput, ScoreReply, ScoreRequest


def drain(scorer: Any, limit_s: float = 240.0) -> dict[str, ScoreReply]:
    """Return all replies that a scorer still has to give. Fails if one comes twice or never."""
    replies: dict[str, ScoreReply] = {}
    deadline = time.monotonic() + limit_s
    while scorer.num_active:
        assert time.monotonic() < deadline, f"{scorer.num_active} requests without a reply"
        for reply in scorer.poll(0.2):
            assert reply.request_id not in replies
            replies[reply.request_id] = reply
    return replies


def replies_of(scorer: Any, items: Iterable[RewardInput], taskset: str = "train") -> list[ScoreReply]:
    """Return a reply to each item, in their order, and close the scorer."""
    with closing(scorer):
        for number, item in enumerate(items):
            scorer.submit(ScoreRequest(request_id=str(number), taskset=taskset, item=item))
        replies = drain(scorer)
    return [replies[str(number)] for number in range(len(replies))]
