"""All messages, by the name of their contract. Each stage of the flow has a module of its own beside this one.

Rules (docs/contracts.md): one type per stage, frozen; a new field gets a default; a type, default or meaning
never changes and a name is never used again; readers skip fields they do not know. The contract of each message is
`schemas/<name>.json`; the modules follow it. Times are seconds since the Unix epoch, as the writer's clock had it.
Ids are derived, never drawn (`ids`).
"""

from __future__ import annotations

from rftstream.contracts.batches import BatchManifest, Experience
from rftstream.contracts.control import Claim, Request, RunFinished, RunManifest, RunState, TasksEnded, Trimmed
from rftstream.contracts.dead import DeadDropped, DeadLetter
from rftstream.contracts.demonstrations import Demonstration
from rftstream.contracts.feedback import Feedback
from rftstream.contracts.outcomes import GroupOutcome
from rftstream.contracts.rollouts import PartialRollout, Rollout
from rftstream.contracts.tasks import Task
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.contracts.versions import EvalResult, StepRecord, WeightsAnnounced

MESSAGES: dict[str, type] = {
    "task": Task,
    "rollout": Rollout,
    "partial_rollout": PartialRollout,
    "verified_rollout": VerifiedRollout,
    "demonstration": Demonstration,
    "feedback": Feedback,
    "experience": Experience,
    "batch_manifest": BatchManifest,
    "group_outcome": GroupOutcome,
    "weights_announced": WeightsAnnounced,
    "step_record": StepRecord,
    "eval_result": EvalResult,
    "run_manifest": RunManifest,
    "claim": Claim,
    "run_state": RunState,
    "tasks_ended": TasksEnded,
    "run_finished": RunFinished,
    "request": Request,
    "dead_letter": DeadLetter,
    "dead_dropped": DeadDropped,
    "trimmed": Trimmed,
}
"""Contract name -> type. The name travels in the header `contract`; `schemas/<name>.json` is the contract."""

Message = (
    Task
    | Rollout
    | PartialRollout
    | VerifiedRollout
    | Demonstration
    | Feedback
    | Experience
    | BatchManifest
    | GroupOutcome
    | WeightsAnnounced
    | StepRecord
    | EvalResult
    | RunManifest
    | Claim
    | RunState
    | TasksEnded
    | RunFinished
    | Request
    | DeadLetter
    | DeadDropped
    | Trimmed
)
