"""The table of messages. `message` above each class declares it, in the module of its stage.

Rules (docs/contracts.md): one type per stage, frozen; a new field gets a default; a type, default or meaning
never changes and a name is never used again; readers skip fields they do not know. The contract of each message is
`schemas/<name>.json`; the modules follow it. Times are seconds since the Unix epoch, as the writer's clock had it.
Ids are derived, never drawn (`ids`).
"""

from __future__ import annotations

from rftstream.contracts import (
    batches,
    control,
    dead,
    demonstrations,
    feedback,
    outcomes,
    problems,
    questions,
    rollouts,
    summaries,
    tasks,
    verdicts,
    versions,
)
from rftstream.contracts.message_spec import SPEC_OF, Message, MessageSpec
from rftstream.contracts.topics import TOPICS

__all__ = ["CONTRACTS_ON", "MESSAGES", "SPEC_OF", "Message"]

_FLOW = (tasks, rollouts, verdicts, demonstrations, problems, feedback, questions, batches, outcomes, versions)
_STAGES = (*_FLOW, control, dead, summaries)

MESSAGES: dict[str, MessageSpec] = {
    spec.contract: spec for stage in _STAGES for spec in SPEC_OF.values() if spec.type.__module__ == stage.__name__
}
"""Contract -> the declaration of its message. The order is that of the flow, as lists and docs show it."""

CONTRACTS_ON: dict[str, tuple[str, ...]] = {
    topic: tuple(spec.contract for spec in MESSAGES.values() if spec.topic == topic) for topic in TOPICS
}
"""Topic -> the contracts that may be on it."""
