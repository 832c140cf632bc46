"""A finished run with all that the studio's pages show, in plain English: `python -m tests.full_run FOLDER [ROLLOUTS]`.

Beside the word problems of `text_run` notes are made polite in several turns, some of which fail; two evaluations; a
pause; another reward in the second half; dead letters; questions with the votes of three people; notes.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rftstream.contracts.assistant import ToolCall
from rftstream.contracts.control import DesiredState, RunState
from rftstream.contracts.dead import DeadLetter
from rftstream.contracts.feedback import Feedback, FeedbackKind, PairChoice, feedback_id_of, question_id_of
from rftstream.contracts.questions import Question, QuestionReason
from rftstream.contracts.rollouts import Rollout, RolloutStatus, Turn
from rftstream.contracts.tasks import RolloutIds
from rftstream.runs.folder import OpenRun
from rftstream.runs.notes import RunNotes
from tests.text_run import PARTITIONS, Attempted, Story, TextRun, make_text_run, stories

PAUSE_S = 7_500.0
"""Length of the pause after a third of the batches."""
PEOPLE = tuple(f"{number:x}" * 32 for number in (1, 10, 15))
ERRORS = (
    ("reward", "the reward raised ValueError: could not convert string to float: 'forty-two'"),
    ("decode", "rollouts[2]@8172 rollout.v2 $.turns[0].content: got null, expected str"),
)
NOTES = (
    ("the heating in my office does not work and nobody cares", "the caretaker"),
    ("you sent me the wrong book, I want my money back", "the shop"),
    ("the report is late again, this cannot go on", "a colleague"),
    ("turn the music down, some of us have to sleep", "the neighbours"),
    ("your dog was in my garden, it ate my strawberries", "the neighbours"),
    ("I will not come on Saturday, it is too far away", "a friend"),
    ("the soup was cold and the waiter was rude", "the restaurant"),
    ("send me the figures today or I cannot finish the budget", "a colleague"),
)
OPENINGS = ("I hope that you are well.", "Thank you for your patience.", "I am sorry to trouble you.", "Good morning!")
ENDINGS = ("Kind regards", "Many thanks in advance", "With best wishes", "Yours sincerely")


@dataclass(frozen=True)
class Letter(Story):
    """A rude note that is to be written anew, in two rounds."""

    @property
    def text(self) -> str:
        return (
            "Write this note to {whom} politely, in two or three sentences: “{note}”. Keep what it asks for, and do not"
            " invent anything. Number {number} of the collection."
        ).format_map(self.numbers)

    @property
    def answer(self) -> str:
        return f"a polite note to {self.numbers['whom']}"

    def say(self, draw: random.Random, skill: float) -> tuple[tuple[Turn, ...], RolloutStatus, float]:
        if draw.random() < 0.02:
            return (self.turn("Here is a first version, but", "stop"),), RolloutStatus.failed, 0.0
        first = f"Here is a first version. {draw.choice(OPENINGS)} I write because {self.numbers['note']}."
        if draw.random() < 0.05:
            said = " ".join([first, *[f"Or perhaps: {one}" for one in OPENINGS] * 4])
            return (self.turn(said, "length"),), RolloutStatus.truncated, 0.0
        call = ToolCall(id="call_0_0", name="thesaurus", arguments={"word": "rude"}, text="rude")
        calls = (call,) if draw.random() < 0.3 else ()
        turns = [self.turn(first, "stop", *calls)]
        if calls:
            turns += [Turn(role="tool", content="impolite, blunt, curt")]
        turns += [Turn(role="user", content="Shorter, please, and end with a greeting.")]
        end = f"{draw.choice(OPENINGS)} Could you have a look? {draw.choice(ENDINGS)}, {draw.choice(('Mia', 'Omar'))}"
        turns += [self.turn(end, "stop")]
        return tuple(turns), RolloutStatus.completed, round(min(1.0, max(0.0, draw.gauss(0.3 + 0.5 * skill, 0.2))), 2)


def letters(count: int, seed: int) -> list[Story]:
    """Return notes to be made polite."""
    draw = random.Random(seed)
    chosen = [draw.choice(NOTES) for _ in range(count)]
    return [Letter({"note": note, "whom": whom, "number": place}) for place, (note, whom) in enumerate(chosen)]


class FullRun(TextRun):
    """Writes such a run."""

    TASKSETS = ("word-problems", "letters-to-people")
    EVALUATIONS = ("held-out", "letters-held-out")

    def __init__(self, run: OpenRun, num_batches: int) -> None:
        super().__init__(run, num_batches)
        self.problems = {"word-problems": stories(40, 1), "letters-to-people": letters(20, 3)}
        self.held_out = {"held-out": stories(24, 2), "letters-held-out": letters(12, 4)}
        self._letters = 0

    def write(self) -> None:
        super().write()
        notes = RunNotes(self.run.folder)
        notes.add("v3", "The first version that ends its letters with a greeting.", ("good", "look-again"), by="ada")
        notes.add("word-problems/0/0/0/1", "Counts right, and forgets the boxes.", ("arithmetic",), by="omar")

    def _at(self, batch: float) -> float:
        return super()._at(batch) + PAUSE_S * (batch > self.num_batches // 3)

    def _scorer(self, batch: int) -> str:
        return "2" if 2 * batch > self.num_batches else "1"

    def _batch(self, batch: int) -> None:
        super()._batch(batch)
        if batch == self.num_batches // 3 - 1:
            began, ended = self._at(batch + 1) + 5.0, self._at(batch + 1) + PAUSE_S
            self._add("control", 0, RunState(state=DesiredState.paused, by="ada", reason="a new disk", since=began))
            self._add("control", 0, RunState(state=DesiredState.running, by="ada", reason="it is in", since=ended))

    def _group(self, version: int) -> list[Attempted]:
        found = super()._group(version)
        if self.draw.random() < 0.03:
            self._die(found[0][1])
        if self.draw.random() < 0.15:
            self._ask(found[0][0], found[1][0])
        return found

    def _die(self, rollout: Rollout) -> None:
        reason, detail = self.draw.choice(ERRORS)
        place, offset = rollout.ids.sequence % PARTITIONS, self._letters
        self._letters += 1
        self._add("dead", 0, DeadLetter(
            topic="rollouts", partition=place, offset=offset, key=b"key", value=b"not a record", role="verifier",
            headers=(("rollout_id", rollout.ids.rollout_id.encode()),), reason=reason, detail=detail, tries=3,
            dead_at=self._at(rollout.ids.min_version),
        ))  # fmt: skip

    def _ask(self, one: RolloutIds, other: RolloutIds) -> None:
        is_pair = self.draw.random() < 0.5
        kind = FeedbackKind.pair if is_pair else FeedbackKind.rating
        names = (one.rollout_id, other.rollout_id) if is_pair else (one.rollout_id,)
        asked, at, place = question_id_of(kind, names), self._at(one.min_version), one.sequence % PARTITIONS
        order = (1, 0) if is_pair else ()
        self._add("questions", 0, Question(
            question_id=asked, kind=kind, rollouts=names, group_id=one.group_id, sequence=one.sequence, quorum=2,
            reason=QuestionReason.share, asked_at=at, order=order,
        ))  # fmt: skip
        for who in self.draw.sample(PEOPLE, self.draw.choice((0, 1, 2, 2))):
            self._add("feedback", place, Feedback(
                feedback_id=feedback_id_of(asked, who, 0), rollout_id=names[0], rollouts=names, source="studio",
                kind=kind, question_id=asked, sequence=one.sequence, annotator=who, given_at=at + 60.0, order=order,
                reward=None if is_pair else float(self.draw.randint(1, 5)), lead_time_s=self.draw.uniform(4, 40),
                choice=self.draw.choice(list(PairChoice)) if is_pair else None,
            ))  # fmt: skip


def make_full_run(folder: Path, num_rollouts: int) -> None:
    """Write a run with at least so many rollouts into a new folder."""
    make_text_run(
        folder, num_rollouts, kind=FullRun, feedback={"ask": "rating", "share": 0.1, "pairs": 0.1, "quorum": 2}
    )


def main(arguments: Sequence[str]) -> None:
    make_full_run(Path(arguments[0]), int(arguments[1]) if len(arguments) > 1 else 10_000)


if __name__ == "__main__":
    main(sys.argv[1:])
