"""The run from the bridge's point of view: questions, current votes of each annotator, texts of rollouts, and new
votes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rftstream.contracts.control import RunManifest
from rftstream.contracts.feedback import Feedback, FeedbackKind
from rftstream.contracts.questions import Question
from rftstream.data.feedback.rows import Vote
from rftstream.gateway.keys import GatewayKeys, run_secret
from rftstream.queries.catalog.finding import find_group, find_vote_statuses
from rftstream.queries.catalog.moments import Moment
from rftstream.queries.catalog.updating import CatalogUpdater
from rftstream.queries.people.feedback import TOPICS, FeedbackRecords, FeedbackView
from rftstream.queries.records.rollout_view import ShownMessage, last_answer, read_rollout
from rftstream.queries.records.shown import PLAIN
from rftstream.runs.folder import OpenRun, wanted_topics
from rftstream.runs.writes.additions import MAX_RECORDS
from rftstream.runs.writes.feedback import VoteRevisions, next_revision, vote_record
from rftstream.service.control_view import read_manifest
from rftstream.service.role import Log
from rftstream.transport.base import Producer

log = logging.getLogger(__name__)

MAX_ORIGINAL = 200_000
"""Most characters of an answer that the field for its correction is filled with."""
NewestVotes = Mapping[tuple[str, str], Feedback]
"""Newest vote of each annotator: (question_id, annotator) -> record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingVote:
    """The current vote of an annotator in Label Studio. The bridge makes it; `BridgedRun.write` writes it if the log
    has another vote or none."""

    vote: Vote
    annotator: str
    """Annotator's hash, as on the log."""
    sequence: int


class BridgedRun:
    """One run. The bridge's process makes it and calls `begin` before it reads anything. In each round it calls `look`,
    `write` and `task_data`; at the end, `close`. One thread uses it. After ProducerLost, `begin` is called again."""

    def __init__(self, run: OpenRun, source: str) -> None:
        """`source`: the name on the log for votes of this server."""
        self.run, self.source = run, source
        self._log = Log(run.transport)
        self._keys: GatewayKeys | None = None
        self._producer: Producer | None = None
        self._updater: CatalogUpdater | None = None
        self._kept = FeedbackRecords()
        self._revisions = VoteRevisions()

    def begin(self) -> None:
        """Fence any other bridge of this run, so that it can write no more. Everything read before is out of date."""
        admin = self.run.transport.admin
        admin.ensure_topics({name: wanted_topics(self.run.config)[name] for name in TOPICS})
        if self._producer is not None:
            self._producer.close()
        self._producer = self.run.transport.producer(f"{self.run.run_id}.feedback.{self.source}")
        self._producer.start()
        self._kept = FeedbackRecords()
        self._revisions = VoteRevisions()

    def manifest(self) -> RunManifest | None:
        """Return the run's manifest, or None before the run has begun."""
        return read_manifest(self.run.transport)

    def annotator(self, user: int) -> str:
        """Return the log's name for a user of Label Studio."""
        if self._keys is None:
            self._keys = GatewayKeys(run_secret(self.run.run_id), self.run.run_id)
        return self._keys.annotator(f"{self.source}:{user}")

    # ------------------------------------------------------------------------------------------ reading

    def look(self) -> FeedbackView:
        """Read the questions and votes of the run."""
        if self._updater is None:
            self._updater = CatalogUpdater(self.run)
        self._updater.update()
        catalog = self._updater.open_catalog()
        with contextlib.nullcontext() if catalog is None else catalog:
            find = None if catalog is None else partial(find_vote_statuses, catalog)
            return self._kept.view(self._log, self.run.config, find)

    def standing(self) -> NewestVotes:
        """Return the newest vote of each annotator on each question, retracted votes included."""
        return self._revisions.follow(self._log)

    # ------------------------------------------------------------------------------------------ writing

    def write(self, votes: Iterable[StandingVote], standing: NewestVotes) -> list[Feedback]:
        """Write the votes that the log does not have, each as the next revision. Return their records. ProducerLost if
        another bridge has begun."""
        assert self._producer is not None, "begin comes first"
        new = []
        for found in votes:
            before = standing.get((found.vote.question_id, found.annotator))
            feedback = next_revision(found.vote, found.annotator, found.sequence, before)
            if feedback is not None and (before is not None or feedback.kind is not FeedbackKind.retract):
                new.append(feedback)
        for start in range(0, len(new), MAX_RECORDS):
            chunk = new[start : start + MAX_RECORDS]
            self._producer.commit([vote_record(one, self.run.config, self.run.run_id) for one in chunk])
            for one in chunk:
                self._revisions.note(one)
        if new:
            self.run.transport.admin.make_durable()
        return new

    # ------------------------------------------------------------------------------------------ texts

    def task_data(self, question: Question) -> dict[str, Any] | None:
        """Return the data of a task for a question. None: its rollouts cannot be read yet. Empty: they never can."""
        catalog = None if self._updater is None else self._updater.open_catalog()
        if catalog is None:
            return None
        with catalog:
            group = find_group(catalog, Moment(), question.group_id)
        if group is None:
            self._look_anew()
            return None
        rows = {row.rollout_id: row for row in group.siblings}
        if not rows.keys() >= set(question.rollouts):
            return None
        partitions = self.run.config.transport.partitions
        views = [
            read_rollout(self.run.transport, group, rows[name], PLAIN, num_partitions=partitions)
            for name in question.rollouts
        ]
        if lost := [view for view in views if view.rollout is None]:
            log.warning("%s: not shown in Label Studio: %s", question.question_id, lost[0].missing)
            return {}
        problem = next((view.problem for view in views if view.problem), ())
        reference = next((view.answer for view in views if view.answer is not None), None)
        asked = _words_of(problem, always_named=len(problem) > 1)
        data = {
            "question": question.question_id,
            "run": self.run.run_id,
            "reason": str(question.reason),
            "prompt": asked if reference is None else f"{asked}\n\n[reference answer]\n{_shown(reference)}",
        }
        shown = [_words_of(view.turns, always_named=len(view.turns) > 1) for view in views]
        if question.kind is FeedbackKind.pair:
            first, second = question.order or (0, 1)
            return {**data, "a": shown[first], "b": shown[second]}
        original = _shown(last_answer(views[0].rollout))
        return {**data, "response": shown[0], "original": original if len(original) <= MAX_ORIGINAL else ""}

    def _look_anew(self) -> None:
        """Release the catalog if another process writes it: that process may have ended."""
        if self._updater is not None:
            self._updater.close()
            self._updater = None

    def close(self) -> None:
        """Close everything that was opened, the run's transport included."""
        self._look_anew()
        if self._producer is not None:
            with contextlib.suppress(Exception):  # it may be lost already
                self._producer.close()
        self.run.transport.close()


def _words_of(messages: Sequence[ShownMessage], *, always_named: bool) -> str:
    """Return messages as text. With several messages, each has its speaker in front."""
    parts = []
    for message in messages:
        lines = ["".join(text for text, _ in message.pieces), *message.calls, *message.images]
        text = _shown("\n".join(line for line in lines if line))
        parts.append(f"[{message.role}]\n{text}" if always_named else text)
    return "\n\n".join(parts) or "(nothing)"


def _shown(text: str) -> str:
    """Return a text with null characters replaced, since PostgreSQL refuses them."""
    return text.replace("\0", "\ufffd")
