"""A task that benchmarks put on the log by themselves."""

from __future__ import annotations

from rftstream.contracts import ids
from rftstream.contracts.tasks import ChatMessage, Problem, RolloutIds, Sampling, Task


def one_task(
    number: int, sampling: Sampling, *, question: str = "1+1=", answer: str = "2", environment: str = "single_turn"
) -> Task:
    """Return the only task of the group with this number."""
    group_id = ids.group_id("sums", 0, number, 0)
    return Task(
        ids=RolloutIds(
            rollout_id=ids.rollout_id(group_id, 0),
            group_id=group_id,
            taskset="sums",
            sibling=0,
            group_size=1,
            sequence=number,
            min_version=0,
        ),
        problem=Problem(messages=(ChatMessage(role="user", content=question),), answer=answer),
        sampling=sampling,
        seed=number,
        environment=environment,
    )
