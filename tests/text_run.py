"""A finished run whose rollouts say something: word problems, answers of several sentences, a tool, truncated ones.

What the roles would have written, straight through a producer: `python -m tests.text_run FOLDER [ROLLOUTS]`. The same
number of rollouts gives the same run.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rftstream import __version__
from rftstream.config import loader
from rftstream.contracts import codec, ids
from rftstream.contracts.arrays import Array
from rftstream.contracts.assistant import ToolCall
from rftstream.contracts.batches import BatchManifest, Experience, LossKind
from rftstream.contracts.control import Claim, RunFinished, RunManifest
from rftstream.contracts.messages import Message
from rftstream.contracts.outcomes import GroupOutcome, GroupResult, RolloutSummary
from rftstream.contracts.records import NewRecord
from rftstream.contracts.role_names import RoleName
from rftstream.contracts.rollouts import Rollout, RolloutStatus, Segment, Turn, VersionSpan
from rftstream.contracts.tasks import ChatMessage, Problem, RolloutIds, Sampling, Task
from rftstream.contracts.topics import TOPICS
from rftstream.contracts.verdicts import UnscorableReason, Verdict, VerifiedRollout
from rftstream.contracts.versions import EvalResult, StepRecord, VersionName
from rftstream.runs.folder import OpenRun, RunFolder, create_log, open_store, open_transport
from rftstream.service.role import Log

GROUP_SIZE, GROUPS_PER_BATCH, PARTITIONS = 8, 8, 4
NUM_PROBLEMS, NUM_HELD_OUT = 60, 24
Attempted = tuple[RolloutIds, Rollout, float]
"""A rollout with its reward."""
BEGAN_AT = 1_780_000_000.0
STEP_S = 20.0
SAMPLING = Sampling()
NAMES = ("Mia", "Tom", "Amara", "Jonas", "Priya", "Diego", "Lena", "Kofi", "Yuki", "Sara", "Omar", "Ines")
THINGS = ("apples", "marbles", "stickers", "pencils", "shells", "coins", "books", "cookies", "stamps", "beads")
STEPS = (
    "Let me work through this step by step.",
    "First I look at what {name} has at the beginning.",
    "The question asks how many {thing} are left in the end, so I keep a running total.",
    "I have to be careful: some of the {thing} are given away before new ones are bought.",
    "At the start there are {a} {thing}.",
    "A friend takes {b} of them, which leaves {a} - {b} = {d}.",
    "Then {c} boxes with {e} {thing} each are bought, and {c} times {e} is {f}.",
    "Checking once more: the numbers of the story are {a}, {b}, {c} and {e}.",
    "Each box has the same number of {thing}, so multiplying is right here.",
)


@dataclass(frozen=True)
class Story:
    """A word problem with its answer."""

    numbers: dict[str, object]

    @property
    def text(self) -> str:
        return (
            "{name} has {a} {thing}. A friend gets {b} of them. On the way home {name} buys {c} boxes with {e} {thing}"
            " each. How many {thing} does {name} have now? End with the number after ####."
        ).format_map(self.numbers)

    @property
    def answer(self) -> str:
        return str(self.numbers["answer"])

    @staticmethod
    def turn(text: str, why: str, *calls: ToolCall) -> Turn:
        return Turn(role="assistant", content=text, num_tokens=len(text.encode()), finish_reason=why, tool_calls=calls)

    def say(self, draw: random.Random, skill: float) -> tuple[tuple[Turn, ...], RolloutStatus, float]:
        """An attempt: its turns, how it ended, and its reward."""
        chosen = sorted(draw.sample(range(len(STEPS)), draw.randint(2, 5)))
        said = " ".join(STEPS[number].format_map(self.numbers) for number in chosen)
        if draw.random() < 0.04:
            text = f"{said} Wait, let me start again. {said}"
            return (Story.turn(text, "length"),), RolloutStatus.truncated, 0.0
        is_right = draw.random() < skill
        answer = int(self.answer) if is_right else int(self.answer) + draw.choice((-10, -2, -1, 1, 3, 10))
        marked = is_right or draw.random() < 0.7
        end = f"So {self.numbers['name']} has {answer} {self.numbers['thing']} now." + (
            f" #### {answer}" if marked else ""
        )
        reward = 1.0 if is_right else 0.1 if marked else 0.0
        if draw.random() < 0.2:
            asked = f"{self.numbers['d']} + {self.numbers['f']}"
            call = ToolCall(id="call_0_0", name="calculator", arguments={"expression": asked}, text=asked)
            turns = (
                Story.turn(f"{said} I ask the calculator.", "stop", call),
                Turn(role="tool", content=self.answer),
                Story.turn(end, "stop"),
            )
            return turns, RolloutStatus.completed, reward
        return (Story.turn(f"{said} {end}", "stop"),), RolloutStatus.completed, reward


def stories(count: int, seed: int) -> list[Story]:
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        a, b, c, e = draw.randint(20, 90), draw.randint(2, 19), draw.randint(2, 9), draw.randint(2, 12)
        numbers = {"name": draw.choice(NAMES), "thing": draw.choice(THINGS), "a": a, "b": b, "c": c, "e": e}
        found.append(Story({**numbers, "d": a - b, "f": c * e, "answer": a - b + c * e}))
    return found


def _segment(turns: tuple[Turn, ...], version: int) -> Segment:
    """The bytes of the turns as tokens, as the fake model has them."""
    token_ids, mask, spans = list(b"? "), [0, 0], []
    for turn in turns:
        said, is_sampled = turn.content.encode(), turn.role == "assistant"
        if is_sampled:
            spans.append(VersionSpan(start=len(mask), count=len(said), trainer_epoch=1, version=version))
        token_ids += said
        mask += [int(is_sampled)] * len(said)
    logprobs = [-0.2 * sampled * (token % 7) for token, sampled in zip(token_ids, mask, strict=True)]
    return Segment(
        token_ids=Array.of(token_ids, "int32"),
        behavior_logprobs=Array.of(logprobs, "float32"),
        loss_mask=Array.of(mask, "uint8"),
        versions=tuple(spans),
    )


class TextRun:
    """Writes the run, batch after batch."""

    TASKSETS: ClassVar[tuple[str, ...]] = ("word-problems",)
    EVALUATIONS: ClassVar[tuple[str, ...]] = ("held-out",)

    def __init__(self, run: OpenRun, num_batches: int) -> None:
        self.run, self.num_batches = run, num_batches
        self.draw = random.Random(7)
        self.problems = {"word-problems": stories(NUM_PROBLEMS, 1)}
        self.held_out = {"held-out": stories(NUM_HELD_OUT, 2)}
        self.store = open_store(run.config, run.folder)
        self._producer = run.transport.producer("text-run")
        self._producer.start()
        self._sequence = self._trained = 0
        self._records: list[NewRecord] = []

    def write(self) -> None:
        self._begin()
        for batch in range(self.num_batches):
            self._batch(batch)
            if (batch + 1) % max(1, self.num_batches // 6) == 0:
                for evaluation in self.held_out:
                    self._evaluate(batch + 1, evaluation)
            self._producer.commit(self._records)
            self._records = []
        name = VersionName(trainer_epoch=1, version=self.num_batches)
        self._add("control", 0, RunFinished(reason="steps", name=name, finished_at=self._at(self.num_batches)))
        self._producer.commit(self._records)

    def _at(self, batch: float) -> float:
        return BEGAN_AT + STEP_S * batch

    def _skill(self, version: int) -> float:
        return 0.25 + 0.6 * version / self.num_batches

    def _scorer(self, batch: int) -> str:
        """Return the version of the reward that scores at a batch."""
        return "1"

    def _begin(self) -> None:
        for role in (RoleName.feeder, RoleName.buffer, RoleName.trainer, RoleName.evaluator):
            claim = Claim(role=role, epoch=1, host="bench", pid=1, process=f"{role}-0", claimed_at=BEGAN_AT)
            self._add("control", 0, claim)
        manifest = RunManifest(
            run=self.run.run_id, created_at=BEGAN_AT, config="",
            digests={f"taskset.{name}": "" for name in self.problems}, partitions=PARTITIONS, shares=1, seed=0,
            rftstream_version=__version__,
        )  # fmt: skip
        self._add("control", 0, manifest)
        self._step(0, {}, resumed=True)

    def _batch(self, batch: int) -> None:
        """Groups until enough of them have a spread of rewards; the others are filtered, and a few die."""
        entries: list[Attempted] = []
        groups: list[str] = []
        while len(groups) < GROUPS_PER_BATCH:
            found = self._group(max(0, batch - self.draw.randint(0, 1)))
            rewards = {reward for _, _, reward in found}
            group_id = found[0][0].group_id
            if self.draw.random() < 0.01:
                self._outcome(found, GroupResult.dead, "too_few_scored", None)
            elif len(rewards) == 1:
                self._outcome(found, GroupResult.filtered, "zero_variance", None)
            else:
                groups.append(group_id)
                entries += found
                self._outcome(found, GroupResult.batched, "complete", batch)
        for position, (one, rollout, reward) in enumerate(entries):
            experience = Experience(
                ids=one, batch_sequence=batch, share=0, position=position, loss_kind=LossKind.rl,
                segments=rollout.segments, reward=reward, sampling=SAMPLING,
            )  # fmt: skip
            self._add("batches", 0, experience)
        self._trained += len(groups)
        last = batch + 1 == self.num_batches
        manifest = BatchManifest(
            batch_sequence=batch, share=0, num_shares=1, count=len(entries), digest="sha256:" + "0" * 64,
            groups=tuple(groups), num_groups=len(groups), total_groups=self._trained, last=last,
        )  # fmt: skip
        self._add("batches", 0, manifest)
        rewards_of = [reward for _, _, reward in entries]
        lengths = [rollout.num_tokens for _, rollout, _ in entries]
        metrics = {
            "reward": sum(rewards_of) / len(rewards_of), "loss": self.draw.gauss(0, 0.02),
            "tokens": float(sum(lengths)),
            "length_mean": sum(lengths) / len(lengths), "entropy": 0.9 - 0.5 * batch / self.num_batches,
            "staleness_mean": 0.5, "staleness_max": 1.0, "step_s": 1.5 + self.draw.random(), "lr": 1e-6,
            "grad_norm": 0.4 + 0.1 * self.draw.random(), "mismatch_k3": 0.001 + 0.001 * self.draw.random(), "ess": 0.98,
            "truncated_share": sum(one.status is RolloutStatus.truncated for _, one, _ in entries) / len(entries),
        }  # fmt: skip
        self._step(batch + 1, metrics, last=last)

    def _group(self, version: int) -> list[Attempted]:
        sequence, self._sequence = self._sequence, self._sequence + 1
        chosen = [(name, number) for name, some in self.problems.items() for number in range(len(some))]
        taskset, number = chosen[sequence % len(chosen)]
        story = self.problems[taskset][number]
        group = ids.group_id(taskset, sequence // len(chosen), number, 0)
        problem = Problem(messages=(ChatMessage(role="user", content=story.text),), answer=story.answer)
        hard = self.draw.random() < 0.1
        found = []
        for sibling in range(GROUP_SIZE):
            one = RolloutIds(
                rollout_id=ids.rollout_id(group, sibling), group_id=group, taskset=taskset, sibling=sibling,
                group_size=GROUP_SIZE, sequence=sequence, min_version=version,
            )  # fmt: skip
            turns, status, reward = story.say(self.draw, 0.0 if hard else self._skill(version))
            num_tokens = sum(turn.num_tokens for turn in turns)
            rollout = Rollout(
                ids=one, status=status, problem=problem, turns=turns, segments=(_segment(turns, version),),
                num_tokens=num_tokens, sampling=SAMPLING,
            )  # fmt: skip
            verdict = Verdict(reward=reward, scorer="exact", scorer_version=self._scorer(version))
            place = sequence % PARTITIONS
            self._add("tasks", place, Task(ids=one, problem=problem, sampling=SAMPLING, seed=7))
            self._add("rollouts", place, rollout)
            self._add("verified", place, VerifiedRollout(ids=one, rollout=rollout, verdict=verdict))
            found.append((one, rollout, reward))
        return found

    def _outcome(self, found: list[Attempted], result: GroupResult, reason: str, batch: int | None) -> None:
        dead = result is GroupResult.dead
        first = found[0][0]
        summaries = tuple(
            RolloutSummary(
                rollout_id=one.rollout_id, num_tokens=rollout.num_tokens, status=rollout.status,
                reward=None if dead else reward, reason=UnscorableReason.timeout if dead else None,
            )
            for one, rollout, reward in found
        )  # fmt: skip
        self._add("outcomes", 0, GroupOutcome(
            group_id=first.group_id, taskset=first.taskset, sequence=first.sequence, result=result, reason=reason,
            batch_sequence=batch, rollouts=summaries,
        ))  # fmt: skip

    def _step(self, version: int, metrics: dict[str, float], *, resumed: bool = False, last: bool = False) -> None:
        self._add("steps", 0, StepRecord(
            name=VersionName(trainer_epoch=1, version=version), batch_sequence=None if resumed else version - 1,
            positions=(0,), trained_groups=self._trained, trained_rollouts=self._trained * GROUP_SIZE,
            weights_digest=None, metrics=metrics, resumed=resumed, last=last, recorded_at=self._at(version),
            scorers={} if resumed else {name: f"exact {self._scorer(version)}" for name in self.problems},
        ))  # fmt: skip

    def _evaluate(self, version: int, evaluation: str) -> None:
        lines, rewards = [], []
        for task, story in enumerate(self.held_out[evaluation]):
            turns, _, reward = story.say(self.draw, self._skill(version))
            rewards.append(reward)
            lines.append({
                "sample": f"{task}#0", "prompt": [{"role": "user", "content": story.text}],
                "answer": story.answer,
                "completion": [{"role": turn.role, "content": turn.content, "shown": turn.content} for turn in turns],
                "reward": reward, "posted": None, "reason": None, "num_tokens": sum(turn.num_tokens for turn in turns),
            })  # fmt: skip
        name = VersionName(trainer_epoch=1, version=version)
        target = f"evals/{evaluation}/{name.stem}-1-due.jsonl"
        self.store.put(target, ("\n".join(map(json.dumps, lines)) + "\n").encode())
        self._add("evals", 0, EvalResult(
            evaluation=evaluation, name=name, num_tasks=len(lines), num_samples=1, num_unscored=0,
            metrics={"mean": sum(rewards) / len(rewards)}, generations=target, evaluated_at=self._at(version),
        ))  # fmt: skip

    def _add(self, topic: str, partition: int, message: Message) -> None:
        epoch = int(topic == "control" or TOPICS[topic].writer is not None)
        self._records.append(codec.to_record(message, topic, partition, run=self.run.run_id, writer_epoch=epoch))


def make_text_run(folder: Path, num_rollouts: int, *, kind: type[TextRun] = TextRun, **sections: object) -> None:
    """Write a run with at least so many rollouts into a new folder."""
    num_batches = max(6, -(-num_rollouts // (GROUP_SIZE * GROUPS_PER_BATCH)))
    config = loader.from_dict({
        "run": {"name": folder.name, "steps": num_batches},
        "model": {"path": "fake"},
        "tasksets": {name: {"source": "arithmetic"} for name in kind.TASKSETS},
        "evaluations": {name: {"source": "arithmetic"} for name in kind.EVALUATIONS},
        "feeder": {"group_size": GROUP_SIZE, "groups_per_batch": GROUPS_PER_BATCH},
        "transport": {"partitions": PARTITIONS},
        **sections,
    })  # fmt: skip
    run_folder = RunFolder(folder)
    folder.mkdir(parents=True)
    run_folder.config_file.write_text(loader.to_toml(config), encoding="utf-8")
    log = open_transport(config, run_folder, create=True)
    create_log(log, config)
    kind(OpenRun(run_folder, config, log), num_batches).write()
    log.close()


@dataclass
class Said:
    """A rollout as the log has it."""

    name: str
    sequence: int
    sibling: int
    text: str
    tools: list[str]
    version: int
    status: str
    tokens: int
    reward: float | None
    result: str
    batch: int | None
    taskset: str
    problem: int

    @property
    def of(self) -> str:
        """The name of its problem, as the studio writes it."""
        return f"{self.taskset} {self.problem}"


def read_said(run: OpenRun) -> list[Said]:
    """Return all rollouts of a run in the order of admission, from its log."""
    log, found = Log(run.transport), {}
    for _, message in log.in_force("rollouts"):
        assert isinstance(message, Rollout)
        said = [turn for turn in message.turns if turn.role == "assistant"]
        ids = message.ids
        found[ids.rollout_id] = Said(
            name=ids.rollout_id, sequence=ids.sequence, sibling=ids.sibling,
            text="\n".join(turn.content for turn in said),
            tools=[call.name for turn in said for call in turn.tool_calls],
            version=message.segments[0].versions[0].version, status=str(message.status), tokens=message.num_tokens,
            reward=None, result="pending", batch=None, taskset=ids.taskset,
            problem=int(ids.group_id.split("/")[2]),
        )  # fmt: skip
    for _, message in log.in_force("outcomes"):
        assert isinstance(message, GroupOutcome)
        for one in message.rollouts:
            said_one = found[one.rollout_id]
            said_one.reward, said_one.result, said_one.batch = one.reward, str(message.result), message.batch_sequence
    return sorted(found.values(), key=lambda one: (one.sequence, one.sibling))


if __name__ == "__main__":
    make_text_run(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 10_000)
