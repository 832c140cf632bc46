"""Simulated annotators: they vote, asked or not, edit, retract, say it twice, come late, and tell of what is not there.
Somebody says right answers, also to what others have answered.

What they see is the log, as people see it: a vote may reach the log long after they looked.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.contracts import codec
from rftstream.contracts.feedback import (
    GOLD_ANNOTATOR,
    Feedback,
    FeedbackKind,
    PairChoice,
    feedback_id_of,
    question_id_of,
)
from rftstream.contracts.questions import Question
from rftstream.contracts.records import NewRecord
from rftstream.contracts.rollouts import RolloutStatus
from rftstream.contracts.tasks import RolloutIds
from rftstream.service.role import Log
from rftstream.testing import Faults, Simulation
from tests.simulation.grid import draw_config, draw_faults, judge_by, user_loads
from tests.simulation.joined import with_joined
from tests.simulation.laws import Laws

NUM_PEOPLE = 4
STOPPED_AFTER_S = 400.0
"""Seconds after which nobody says anything any more, so that every run ends."""
ANSWERS = (0.0, 0.5, 1.0)


def with_people(config: RunConfig, random: Random) -> RunConfig:
    """Return the config with people in it, drawn from what `random` has come to: a new setting changes no seed."""
    values = loader.to_dict(config)
    own = Random(f"people {random.getstate()}")
    values["feedback"] = {
        "ask": own.choice(["label", "label", "rating"]),
        "unscorable": own.random() < 0.7,
        "share": own.choice([0.0, 0.3, 1.0]),
        "pairs": own.choice([0.0, 0.5]) if config.feeder.group_size > 1 else 0.0,
        "quorum": own.choice([1, 1, 2, 3]),
        "hold_s": own.choice([0.0, 0.5, 3.0]),
        "weight": own.choice([1.0, 0.25]),
        "scale": [0.0, 1.0],
    }
    if own.random() < 0.5:
        values["feedback"]["expires_s"] = own.choice([0.3, 5.0])
    values["buffer"]["max_refill"] = 100_000
    values["verifier"]["max_dead_share"] = 1.0
    return loader.from_dict(values)


class Annotators:
    """Four people at once. `play_people` makes them, and lets each act again and again."""

    def __init__(self, simulation: Simulation, seed: int) -> None:
        self._simulation = simulation
        self._random, self._gold_random = Random(f"annotators {seed}"), Random(f"gold {seed}")
        self._producer = simulation.transport("people").producer("people")
        self._producer.start()
        self._until = simulation.clock.now() + STOPPED_AFTER_S
        for _ in range(NUM_PEOPLE):
            self._later()

    def _later(self) -> None:
        self._simulation.at(0.05 + self._random.expovariate(2.0), self._act)

    def _act(self) -> None:
        log = Log(self._simulation.transport())
        some = self._records(log)
        if some:
            # It comes now, or a good while after they have looked.
            after_s = 0.0 if self._random.random() < 0.7 else 4.0 * self._random.random()
            self._simulation.at(after_s, lambda: self._producer.commit(some))
        if self._simulation.clock.now() < self._until and self._simulation.failed is None:
            self._later()

    def _records(self, log: Log) -> list[NewRecord]:
        random = self._random
        ids = {
            one.rollout_id: one
            for record in log.read("verified", bodies=False)
            if (one := codec.ids_from_headers(record)) is not None
            and (record.header("status") or b"").decode() in (RolloutStatus.completed, RolloutStatus.truncated)
        }
        said = [one for _, one in log.in_force("feedback") if isinstance(one, Feedback) and one.question_id]
        if not ids:
            return []
        if said and random.random() < 0.15:
            return [self._record(random.choice(said))]  # the same once more
        if said and random.random() < 0.35:
            return [self._record(self._again(random.choice(said), said))]
        asked = [one for _, one in log.in_force("questions") if isinstance(one, Question)]
        if asked and self._gold_random.random() < 0.08:
            question = self._gold_random.choice(asked[-4:])
            return [self._gold(question, ids, said)]
        if asked and random.random() < 0.7:
            question = random.choice(asked[-8:])
            return [self._vote(question.kind, [ids[name] for name in question.rollouts if name in ids], said)]
        newest = list(ids.values())[-20:]
        one = random.choice(newest)
        if random.random() < 0.08:
            sequence = one.sequence if random.random() < 0.5 else one.sequence + 1000
            one = replace(one, sibling=97, rollout_id=f"{one.group_id}/97", group_size=99, sequence=sequence)
        kind = random.choice(
            [FeedbackKind.label, FeedbackKind.rating, FeedbackKind.correction, FeedbackKind.pair, FeedbackKind.flag]
        )
        siblings = [other for other in ids.values() if other.group_id == one.group_id and other != one]
        if kind is FeedbackKind.pair and siblings:
            pair = sorted([one, random.choice(siblings)], key=lambda ids_: ids_.sibling)
            return [self._vote(kind, pair, said)]
        return [self._vote(FeedbackKind.label if kind is FeedbackKind.pair else kind, [one], said)]

    def _vote(self, kind: FeedbackKind, ids: list[RolloutIds], said: list[Feedback]) -> NewRecord:
        rollouts = tuple(one.rollout_id for one in ids)
        if not rollouts or (kind is FeedbackKind.pair) is not (len(rollouts) == 2):  # retention took one of them
            return self._record(Feedback(feedback_id="old", rollout_id="nothing", source="test"))
        question_id, annotator = question_id_of(kind, rollouts), "abcd"[self._random.randrange(NUM_PEOPLE)] * 32
        revision = self._next_revision(question_id, annotator, said)
        vote = Feedback(
            feedback_id=feedback_id_of(question_id, annotator, revision), rollout_id=rollouts[0], source="test",
            kind=kind, question_id=question_id, rollouts=rollouts, sequence=ids[0].sequence, annotator=annotator,
            revision=revision, **self._answer(kind),
        )  # fmt: skip
        return self._record(vote)

    def _gold(self, question: Question, ids: dict[str, RolloutIds], said: list[Feedback]) -> NewRecord:
        record = self._vote(question.kind, [ids[name] for name in question.rollouts if name in ids], said)
        vote = codec.decode(record.value or b"", "feedback") if record.value != b"\xc1" else None
        if not isinstance(vote, Feedback) or not vote.question_id:
            return record
        mine = [one.revision for one in said if (one.question_id, one.annotator) == (vote.question_id, GOLD_ANNOTATOR)]
        revision = max(mine, default=-1) + 1
        feedback_id = feedback_id_of(vote.question_id, GOLD_ANNOTATOR, revision)
        return self._record(replace(vote, annotator=GOLD_ANNOTATOR, revision=revision, feedback_id=feedback_id))

    def _next_revision(self, question_id: str, annotator: str, said: list[Feedback]) -> int:
        mine = [one.revision for one in said if (one.question_id, one.annotator) == (question_id, annotator)]
        newest = max(mine, default=-1)
        return max(0, newest + self._random.choice([1, 1, 1, 1, 2, 0]))

    def _answer(self, kind: FeedbackKind) -> dict[str, Any]:
        random = self._random
        if kind in (FeedbackKind.label, FeedbackKind.rating):
            wrong = kind is FeedbackKind.rating and random.random() < 0.05
            return {"reward": 7.0 if wrong else random.choice(ANSWERS)}
        if kind is FeedbackKind.pair:
            return {"choice": random.choice(list(PairChoice))}
        return {"correction": random.choice(["1", "2"])} if kind is FeedbackKind.correction else {}

    def _again(self, vote: Feedback, said: list[Feedback]) -> Feedback:
        """An edit, or taken back."""
        revision = self._next_revision(vote.question_id, vote.annotator, said)
        kind = FeedbackKind(vote.question_id.partition("/")[0])
        if self._random.random() < 0.4:
            kind = FeedbackKind.retract
        answer = {"reward": None, "choice": None, "correction": None, **self._answer(kind)}
        feedback_id = feedback_id_of(vote.question_id, vote.annotator, revision)
        return replace(vote, feedback_id=feedback_id, kind=kind, revision=revision, **answer)

    def _record(self, vote: Feedback) -> NewRecord:
        config = self._simulation.config
        partition = (vote.sequence or 0) % config.transport.partitions
        record = codec.to_record(vote, "feedback", partition, run=self._simulation.folder.run_id)
        if self._random.random() < 0.03:
            return NewRecord(record.topic, record.partition, record.key, b"\xc1", record.headers)
        return record


def play_people(
    folder: Path, seed: int, *, faults: Faults | None = None, max_ticks: int = 40_000, joined: bool = False
) -> Laws:
    """A run with people, to its end, all laws checked. `joined`: with users' loops for samplers and trainer."""
    random = Random(f"grid {seed}")
    config, drawn = with_people(draw_config(random), random), draw_faults(random)
    if joined:
        config = with_joined(config)
    simulation = Simulation(config, folder=folder, seed=seed, tick_s=0.01, faults=drawn if faults is None else faults)
    user_loads(simulation, random)
    simulation.watch = laws = Laws(simulation, judge_by(config))
    Annotators(simulation, seed)
    try:
        simulation.run(max_ticks)
        laws.check_end()
    except BaseException as error:
        error.add_note(f"{loader.to_toml(config)}\n{simulation.to_text()}\n\nagain: play_people(FOLDER, {seed})")
        raise
    return laws
