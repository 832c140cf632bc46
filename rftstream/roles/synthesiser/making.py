"""One problem in the making: the model is asked for it, then it is attempted, and the attempts are scored.

asked -> attempted -> scored -> admitted
  |          |           |
  '----------'-----------'----> rejected, with the reason
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rftstream.config.role_sections import SynthesiserSection
from rftstream.contracts.problems import (
    NewProblem,
    ProblemKind,
    ProblemMaker,
    RejectedProblem,
    RejectReason,
    made_problem_id,
    problem_digest,
)
from rftstream.contracts.tasks import Problem
from rftstream.contracts.versions import VersionName
from rftstream.roles.synthesiser.parents import Parent

SAID_CHARACTERS = 500
"""Characters of the model's answer that a rejected problem's record keeps."""


@dataclass(slots=True, kw_only=True)
class Making:
    """A problem in the making. The step makes one for each problem that is wanted from a parent. It calls `made` when
    the model has answered, `attempted` for each attempt, and `reject` at any time. `result` returns the record at the
    end."""

    problem_id: str
    taskset: str
    parent: Parent
    kind: ProblemKind
    made_by: str
    settings: SynthesiserSection
    problem: Problem | None = None
    """Problem from the model; None until the model has answered."""
    said: str = ""
    version: VersionName | None = None
    num_open: int = 0
    """Number of attempts without a reward so far."""
    num_scored: int = 0
    num_agreed: int = 0
    trouble: str = ""
    """Reason why the newest attempt without a reward has none."""
    rejected: RejectReason | None = None
    detail: str = ""
    keys: set[str] = field(default_factory=set)
    """Keys of the questions and scores that the problem waits for."""

    @property
    def is_ended(self) -> bool:
        """Whether the problem is admitted or rejected."""
        return self.rejected is not None or (self.problem is not None and not self.num_open)

    def made(self, problem: Problem, version: VersionName | None) -> None:
        """Set the problem that the model made. It is attempted next."""
        self.problem, self.version = problem, version
        self.num_open = self.settings.check_samples

    def attempted(self, reward: float | None, trouble: str = "") -> None:
        """Add the reward of an attempt; None if the attempt has none, with the reason in `trouble`."""
        self.num_open -= 1
        if reward is None:
            self.trouble = trouble
        else:
            self.num_scored += 1
            self.num_agreed += reward >= self.settings.pass_reward
        if not self.num_open:
            self._judge()

    def reject(self, reason: RejectReason, detail: str) -> None:
        """Reject the problem."""
        self.rejected, self.detail = reason, detail

    def result(self, now: float) -> NewProblem | RejectedProblem:
        """Return the record of the admitted or rejected problem."""
        if self.rejected is not None:
            return RejectedProblem(
                problem_id=self.problem_id,
                taskset=self.taskset,
                kind=self.kind,
                parent=self.parent.name,
                parent_group=self.parent.group,
                made_by=self.made_by,
                reason=self.rejected,
                detail=_plain(self.detail),
                said=_plain(self.said),
                version=self.version,
                num_samples=self.num_scored,
                num_agreed=self.num_agreed,
                made_at=now,
            )
        assert self.problem is not None, "it is ended"
        return NewProblem(
            problem_id=self.problem_id,
            taskset=self.taskset,
            problem=self.problem,
            digest=problem_digest(self.problem),
            maker=ProblemMaker.model,
            made_by=self.made_by,
            kind=self.kind,
            parent=self.parent.name,
            parent_group=self.parent.group,
            version=self.version,
            num_samples=self.num_scored,
            num_agreed=self.num_agreed,
            made_at=now,
        )

    def _judge(self) -> None:
        least, most = self.settings.check_agree
        if not self.num_scored:
            self.reject(RejectReason.failed, f"none of the attempts could be scored: {self.trouble}")
        elif not least <= self.num_agreed / self.num_scored <= most:
            self.reject(
                RejectReason.disagreed,
                f"{self.num_agreed} of {self.num_scored} attempts had its answer, expected {least:.0%} to {most:.0%} "
                "(synthesiser.check_agree)",
            )


def wanted_of(parent: Parent, settings: SynthesiserSection, *, into: str, made_by: str) -> list[Making]:
    """Return the problems that are to be made from a parent."""
    has_images = any(message.media for message in parent.problem.messages)
    return [
        Making(
            problem_id=made_problem_id(parent.group, settings.read, kind, number),
            taskset=into,
            parent=parent,
            kind=kind,
            made_by=made_by,
            settings=settings,
        )
        for kind in map(ProblemKind, settings.make)
        if not has_images or kind is ProblemKind.reworded  # the model cannot draw new pictures
        for number in range(settings.per_parent)
    ]


def _plain(text: str) -> str:
    """Return the beginning of a text, in a form that a record can hold."""
    return text[:SAID_CHARACTERS].encode(errors="backslashreplace").decode()
