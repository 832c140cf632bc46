"""The table of messages. A MessageSpec under each class declares it, in the module of its stage; here they are listed.

Rules (docs/contracts.md): one type per stage, frozen; a new field gets a default; a type, default or meaning
never changes and a name is never used again; readers skip fields they do not know. The contract of each message is
`schemas/<name>.json`; the modules follow it. Times are seconds since the Unix epoch, as the writer's clock had it.
Ids are derived, never drawn (`ids`).
"""

from __future__ import annotations

from typing import Any

from rftstream.contracts.batches import BATCH_MANIFEST, EXPERIENCE, BatchManifest, Experience
from rftstream.contracts.control import (
    CLAIM,
    DRAWN,
    REQUEST,
    RUN_FINISHED,
    RUN_MANIFEST,
    RUN_STATE,
    TASKS_ENDED,
    TRIMMED,
    Claim,
    Drawn,
    Request,
    RunFinished,
    RunManifest,
    RunState,
    TasksEnded,
    Trimmed,
)
from rftstream.contracts.dead import DEAD_DROPPED, DEAD_LETTER, DeadDropped, DeadLetter
from rftstream.contracts.demonstrations import DEMONSTRATION, Demonstration
from rftstream.contracts.feedback import FEEDBACK, Feedback
from rftstream.contracts.message_spec import MessageSpec
from rftstream.contracts.outcomes import BATCH_REUSE, GROUP_OUTCOME, BatchReuse, GroupOutcome
from rftstream.contracts.problems import PROBLEM, REJECTED_PROBLEM, NewProblem, RejectedProblem
from rftstream.contracts.questions import JUDGEMENT, QUESTION, Judgement, Question
from rftstream.contracts.rollouts import PARTIAL_ROLLOUT, ROLLOUT, PartialRollout, Rollout
from rftstream.contracts.summaries import SUMMARY, Summary
from rftstream.contracts.tasks import TASK, Task
from rftstream.contracts.topics import TOPICS
from rftstream.contracts.verdicts import VERIFIED_ROLLOUT, VerifiedRollout
from rftstream.contracts.versions import (
    EVAL_RESULT,
    STEP_RECORD,
    WEIGHTS_ANNOUNCED,
    EvalResult,
    StepRecord,
    WeightsAnnounced,
)

MESSAGES: dict[str, MessageSpec[Any]] = {
    spec.contract: spec
    for spec in (
        TASK,
        ROLLOUT,
        PARTIAL_ROLLOUT,
        VERIFIED_ROLLOUT,
        DEMONSTRATION,
        PROBLEM,
        REJECTED_PROBLEM,
        FEEDBACK,
        QUESTION,
        JUDGEMENT,
        EXPERIENCE,
        BATCH_MANIFEST,
        GROUP_OUTCOME,
        BATCH_REUSE,
        WEIGHTS_ANNOUNCED,
        STEP_RECORD,
        EVAL_RESULT,
        RUN_MANIFEST,
        CLAIM,
        RUN_STATE,
        DRAWN,
        TASKS_ENDED,
        RUN_FINISHED,
        REQUEST,
        DEAD_LETTER,
        DEAD_DROPPED,
        TRIMMED,
        SUMMARY,
    )
}
"""Contract -> the declaration of its message. The order is that of the flow, as lists and docs show it."""

Message = (
    Task
    | Rollout
    | PartialRollout
    | VerifiedRollout
    | Demonstration
    | NewProblem
    | RejectedProblem
    | Feedback
    | Question
    | Judgement
    | Experience
    | BatchManifest
    | GroupOutcome
    | BatchReuse
    | WeightsAnnounced
    | StepRecord
    | EvalResult
    | RunManifest
    | Claim
    | RunState
    | Drawn
    | TasksEnded
    | RunFinished
    | Request
    | DeadLetter
    | DeadDropped
    | Trimmed
    | Summary
)
"""Any message: the types of MESSAGES, once more for the type checker."""

SPEC_OF: dict[type, MessageSpec[Any]] = {spec.type: spec for spec in MESSAGES.values()}
"""Type of a message -> its declaration."""

CONTRACTS_ON: dict[str, tuple[str, ...]] = {
    topic: tuple(spec.contract for spec in MESSAGES.values() if spec.topic == topic) for topic in TOPICS
}
"""Topic -> the contracts that may be on it."""
