"""One round of the bridge: first votes, then new tasks, then questions that are over."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rftstream.config.role_sections import FeedbackSection
from rftstream.contracts.feedback import Feedback, FeedbackKind, question_id_of
from rftstream.contracts.questions import Question, QuestionReason
from rftstream.data.feedback.rows import Vote, vote_of
from rftstream.errors import LabelStudioError
from rftstream.integrations.label_studio.bridged_run import BridgedRun, NewestVotes, StandingVote
from rftstream.integrations.label_studio.client import LabelStudio
from rftstream.integrations.label_studio.label_config import TITLES, AnnotationAnswers, read_results
from rftstream.integrations.label_studio.mirror import TaskMirror
from rftstream.integrations.label_studio.projects import Annotation, Projects, ServerTask, in_requests
from rftstream.queries.people.feedback import FeedbackView, open_questions, question_state
from rftstream.queries.plain import Report

log = logging.getLogger(__name__)

MAX_NEW_TASKS = 1000
"""Most new tasks of one round, since their texts are held at once."""
BESIDE = (FeedbackKind.correction, FeedbackKind.flag)
"""Kinds of answers that may be given beside a rating or a label. Each belongs to a separate question."""
REASONS = {
    QuestionReason.unscorable: "its reward could not be computed",
    QuestionReason.disagreement: "the parts of its reward are far apart",
    QuestionReason.share: "chosen by the run's seed",
}
OVER = {
    "judged": "Enough people have answered. What is said now still counts.",
    "expired": "Expired: what is said now is recorded, and changes nothing.",
    "twin": "Asked in another task already.",
}


@dataclass(slots=True, kw_only=True)
class RoundReport(Report):
    """The counts of a round: tasks and votes found, and changes made. `Bridge.round` makes it."""

    questions: int = 0
    """Questions of the run that can be tasks."""
    open: int = 0
    """Questions that wait for answers."""
    tasks: int = 0
    """Tasks in Label Studio for questions of this run, before the round."""
    annotations: int = 0
    """Annotations of these tasks."""
    votes: dict[str, int] = field(default_factory=dict)
    """Votes written, by kind."""
    edits: int = 0
    """Written votes that change an earlier one, retracts included."""
    new_tasks: int = 0
    marked: int = 0
    """Tasks in which the state of their question was noted."""
    unread: int = 0
    """Answers that could not be read."""

    @property
    def did_something(self) -> bool:
        """Whether anything was written on either side."""
        return bool(self.votes or self.new_tasks or self.marked)

    def to_text(self) -> str:
        """Return the counts as text for people."""
        votes = ", ".join(f"{count:,} {kind}" for kind, count in self.votes.items()) or "no new votes"
        edits = f" ({self.edits:,} of them change what was said before)" if self.edits else ""
        return (
            f"{self.open:,} of {self.questions:,} questions open, {self.annotations:,} annotations on "
            f"{self.tasks:,} tasks: {votes}{edits}; {self.new_tasks:,} new tasks, {self.marked:,} marked"
        )


class Bridge:
    """Compares a run with Label Studio and writes the difference. Its process makes it and calls `round` repeatedly.
    After an error the next round starts from the state that it finds."""

    def __init__(
        self,
        run: BridgedRun,
        server: LabelStudio,
        *,
        now: Callable[[], float] = time.time,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """`beat` is called during a long round."""
        self._run, self._server, self._now, self._beat = run, server, now, beat
        self._settings = run.run.config.feedback or FeedbackSection()
        self._projects: Projects | None = None
        self._mirror: TaskMirror | None = None
        self._unshown: set[str] = set()
        """Questions whose rollouts are gone, or whose tasks were refused."""
        self._told: set[tuple[int, float]] = set()
        """Annotations that were already reported as unreadable."""

    def round(self) -> RoundReport:
        """Bring both sides up to date. LabelStudioError or TransportError if one of them cannot be reached."""
        report = RoundReport()
        manifest = self._run.manifest()
        if manifest is None:  # the run has not started, so there are no questions yet
            return report
        if self._projects is None or self._mirror is None:
            settings = self._settings
            self._projects = Projects(self._server, manifest, quorum=settings.quorum, scale=settings.scale)
            self._mirror = TaskMirror(self._projects, self._now, self._beat)
        view = self._run.look()
        questions = {question.question_id: question for question in view.questions if question.kind in TITLES}
        projects = self._projects.find()
        changed = self._mirror.update(projects)
        tasks = {name: found for name, one in questions.items() if (found := self._mirror.tasks(name, one.kind))}
        report.questions = len(questions)
        report.tasks = sum(map(len, tasks.values()))
        report.annotations = sum(len(task.annotations) for same in tasks.values() for task in same)
        self._bring_votes([(questions[name], tasks[name]) for name in tasks if name in changed], report)
        waiting = [question for question in open_questions(view, self._now()) if question.kind in TITLES]
        report.open = len(waiting)
        self._send_tasks([one for one in waiting if one.question_id not in tasks], projects, report)
        self._mark_tasks(view, questions, tasks, report)
        self._mirror.settle()
        return report

    # ------------------------------------------------------------------------------------------ votes

    def _bring_votes(self, changed: Sequence[tuple[Question, Sequence[ServerTask]]], report: RoundReport) -> None:
        standing = dict(self._run.standing())
        ours = _by_question(standing, self._run.source)
        opinions = [opinion for question, tasks in changed for opinion in self._opinions(question, tasks, ours, report)]
        for feedback in self._run.write(opinions, standing):
            report.votes[str(feedback.kind)] = report.votes.get(str(feedback.kind), 0) + 1
            report.edits += feedback.revision > 0
        self._beat()

    def _opinions(
        self,
        question: Question,
        tasks: Sequence[ServerTask],
        ours: Mapping[str, Sequence[Feedback]],
        report: RoundReport,
    ) -> Iterator[StandingVote]:
        """Yield each annotator's current answer to a question, and the answers that were taken back."""
        kinds = (question.kind,) if question.kind is FeedbackKind.pair else (question.kind, *BESIDE)
        said: set[tuple[str, str]] = set()
        for user, (task, annotation) in _newest(tasks).items():
            annotator = self._run.annotator(user)
            original = task.data.get("original")
            found = read_results(
                annotation.results,
                question.kind,
                original=original if isinstance(original, str) else "",
                order=question.order,
            )
            self._tell_unread(task, annotation, found, report)
            for kind, row in found.answers.items():
                vote = self._vote(question, kind, row, annotation)
                said.add((vote.question_id, annotator))
                yield StandingVote(vote=vote, annotator=annotator, sequence=question.sequence)
            # An unreadable annotation changes nothing: the earlier vote stays.
            unread = [question.kind if name == "choice" else FeedbackKind(name) for name in found.unread]
            said |= {(question_id_of(kind, question.rollouts), annotator) for kind in unread}
        if any(annotation.user is None for task in tasks for annotation in task.annotations):
            return  # the owner of an annotation is unknown, so no deletion can be inferred
        for kind in kinds:
            name = question_id_of(kind, question.rollouts)
            for feedback in ours.get(name, ()):
                if (name, feedback.annotator) not in said:
                    vote = _retract(question, name, self._run.source, self._now())
                    yield StandingVote(vote=vote, annotator=feedback.annotator, sequence=question.sequence)

    def _vote(self, question: Question, kind: FeedbackKind, row: Mapping[str, Any], annotation: Annotation) -> Vote:
        more: dict[str, Any] = {"lead_time_s": annotation.lead_time_s}
        if kind is FeedbackKind.pair and question.order:
            more["order"] = list(question.order)
        return vote_of(
            {
                **row,
                **more,
                "rollouts": list(question.rollouts),
                "by": f"{self._run.source}:{annotation.user}",
                "at": annotation.updated_at,
                "source": self._run.source,
            },
            f"annotation {annotation.annotation_id}",
        )

    def _tell_unread(
        self, task: ServerTask, annotation: Annotation, found: AnnotationAnswers, report: RoundReport
    ) -> None:
        report.unread += len(found.unread)
        if found.unread and annotation.age[::-1] not in self._told:
            self._told.add(annotation.age[::-1])
            log.warning(
                "annotation %d of task %d: %s cannot be read, expected what the project's labelling config gives; "
                "passed over",
                annotation.annotation_id,
                task.task_id,
                " and ".join(found.unread),
            )

    # ------------------------------------------------------------------------------------------ tasks

    def _send_tasks(
        self, missing: Sequence[Question], projects: Mapping[int, FeedbackKind], report: RoundReport
    ) -> None:
        assert self._projects is not None
        data: dict[FeedbackKind, list[dict[str, Any]]] = defaultdict(list)
        for question in missing[:MAX_NEW_TASKS]:
            if question.question_id in self._unshown:
                continue
            shown = self._run.task_data(question)
            if shown is None:  # the catalog has not read that far; the next round tries again
                continue
            if not shown:
                self._unshown.add(question.question_id)
                continue
            data[question.kind].append({**shown, "state": "open", "notice": self._notice(question, "open")})
            self._beat()
        for kind, tasks in data.items():
            project = next((number for number, of in projects.items() if of is kind), None)
            if project is None:
                project = self._projects.make(kind)
                log.info("made the project %d of Label Studio for questions of kind %s", project, kind)
            for chunk in in_requests(tasks):
                report.new_tasks += self._send(project, chunk)
                self._beat()

    def _send(self, project: int, tasks: Sequence[dict[str, Any]]) -> int:
        """Send tasks. If the server refuses them, send each alone, so that one task does not hold back the others.
        Return the number of tasks that exist now."""
        assert self._projects is not None
        try:
            self._projects.send(project, tasks)
            return len(tasks)
        except LabelStudioError as error:
            if not error.is_refusal:
                raise
            if len(tasks) > 1:
                return sum(self._send(project, [task]) for task in tasks)
            self._unshown.add(tasks[0]["question"])
            log.warning("%s: not in Label Studio until the bridge is started again: %s", tasks[0]["question"], error)
            return 0

    def _mark_tasks(
        self,
        view: FeedbackView,
        questions: Mapping[str, Question],
        tasks: Mapping[str, Sequence[ServerTask]],
        report: RoundReport,
    ) -> None:
        """Write the state of the questions into their tasks. Tasks whose questions are over leave the queue; none is
        deleted."""
        assert self._projects is not None
        now = self._now()
        for question_id, same in tasks.items():
            question = questions[question_id]
            stands = question_state(view, question, now)
            if stands not in OVER:  # a gold question looks like any other
                stands = "open"
            num_people = len(_newest(same))
            for number, task in enumerate(same):
                state = stands if number == 0 else "twin"
                notice = self._notice(question, state)
                # Two annotations of one person make a task complete for Label Studio, and are one vote.
                is_labeled = state != "open" or num_people >= question.quorum
                if (task.data.get("state"), task.data.get("notice"), task.is_labeled) != (state, notice, is_labeled):
                    self._projects.mark(task, state=state, notice=notice, is_labeled=is_labeled)
                    report.marked += 1
                    self._beat()

    def _notice(self, question: Question, state: str) -> str:
        if state in OVER:
            return OVER[state]
        people = "1 person" if question.quorum == 1 else f"{question.quorum} people"
        return f"Asked of {people}: {REASONS[question.reason]}."


def _newest(tasks: Sequence[ServerTask]) -> dict[int, tuple[ServerTask, Annotation]]:
    """Return each user's newest annotation on the tasks of a question. Skipped annotations are left out."""
    found: dict[int, tuple[ServerTask, Annotation]] = {}
    for task in tasks:
        for annotation in task.annotations:
            if annotation.user is None or annotation.was_skipped:
                continue
            known = found.get(annotation.user)
            if known is None or annotation.age > known[1].age:
                found[annotation.user] = (task, annotation)
    return found


def _by_question(standing: NewestVotes, source: str) -> dict[str, list[Feedback]]:
    """Return the current votes of this server, by question."""
    found: dict[str, list[Feedback]] = defaultdict(list)
    for feedback in standing.values():
        if feedback.source == source and feedback.kind is not FeedbackKind.retract:
            found[feedback.question_id].append(feedback)
    return found


def _retract(question: Question, question_id: str, source: str, now: float) -> Vote:
    return Vote(
        where=question_id,
        by="",
        kind=FeedbackKind.retract,
        question_id=question_id,
        rollouts=question.rollouts,
        given_at=now,
        source=source,
    )
