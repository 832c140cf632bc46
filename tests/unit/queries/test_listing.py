"""Lists of rollouts and of samples, beside the same lists made from the log without an index."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import rftstream
from rftstream.api import looking
from rftstream.contracts.rollouts import RolloutStatus, Turn
from rftstream.queries.catalog import listing, samples
from rftstream.queries.catalog.database import CatalogReader
from rftstream.queries.catalog.finding import GroupFilter, find_groups
from rftstream.queries.catalog.listing import RolloutFilter, find_extremes, find_rollouts
from rftstream.queries.catalog.moments import Moment
from rftstream.queries.catalog.problems import count_problems, find_problems
from rftstream.queries.catalog.texts import HEAD, TAIL, answer_in, cut_text
from rftstream.queries.state.following import RunFollower
from rftstream.runs.folder import OpenRun, open_run
from tests import text_run
from tests.commands import call
from tests.suite.each import each
from tests.text_run import Said, make_text_run, read_said


@dataclass
class Scene:
    catalog: CatalogReader
    run: OpenRun
    said: list[Said]
    """All rollouts, in the order of admission."""
    now: Moment


class Mislabelled(text_run.Story):
    """A story whose reference answer is wrong: nearly each attempt gives the right one, which earns nothing."""

    @property
    def answer(self) -> str:
        return str(int(super().answer) + 7)

    def say(self, draw: random.Random, skill: float) -> tuple[tuple[Turn, ...], RolloutStatus, float]:
        turns, status, reward = text_run.Story(self.numbers).say(draw, 0.95)
        return turns, status, min(reward, 0.1)


MISLABELLED = (17, 41)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("texts") / "words"

    def stories(count: int, seed: int) -> list[text_run.Story]:
        found = make_stories(count, seed)
        return [Mislabelled(one.numbers) if i in MISLABELLED else one for i, one in enumerate(found)]

    make_stories = text_run.stories
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_run, "stories", stories)
        make_text_run(folder, 500)
    follower = RunFollower(open_run(folder))
    while follower.look().has_more:
        pass
    catalog = follower.updater.open_catalog()
    assert catalog is not None
    with catalog:
        now = Moment(version=follower.history.history().version)
        yield Scene(catalog, follower.run, read_said(follower.run), now)
    follower.close()


Wanted = tuple[RolloutFilter, Callable[[Said], bool]]
FILTERS: dict[str, Wanted] = {
    "all": (RolloutFilter(), lambda one: True),
    "text": (RolloutFilter(text="CALCULATOR"), lambda one: "calculator" in one.text),
    "signs of patterns": (RolloutFilter(text="% of_them!"), lambda one: False),
    "marks": (RolloutFilter(text="#### 1"), lambda one: "#### 1" in one.text),
    "truncated": (RolloutFilter(status="truncated"), lambda one: one.status == "truncated"),
    "a tool": (RolloutFilter(tool="calculator"), lambda one: "calculator" in one.tools),
    "any tool": (RolloutFilter(tool="any"), lambda one: bool(one.tools)),
    "another tool": (RolloutFilter(tool="calc"), lambda one: False),
    "reward": (RolloutFilter(reward=(0.05, 0.5)), lambda one: one.reward is not None and 0.05 <= one.reward <= 0.5),
    "length": (RolloutFilter(tokens=(300, None)), lambda one: one.tokens >= 300),
    "version": (RolloutFilter(version=(2, 3)), lambda one: 2 <= one.version <= 3),
    "no such version": (RolloutFilter(version=(99, None)), lambda one: False),
    "filtered": (RolloutFilter(fate="filtered"), lambda one: one.result == "filtered"),
    "dead": (RolloutFilter(fate="dead"), lambda one: one.result == "dead"),
    "trained": (RolloutFilter(fate="trained"), lambda one: one.result == "batched"),
    "nonsense": (RolloutFilter(fate="'; DROP"), lambda one: False),
    "problem": (
        RolloutFilter(groups=GroupFilter(taskset="word-problems", problem=3)),
        lambda one: one.problem == 3,
    ),
    "batch": (RolloutFilter(groups=GroupFilter(batch=2)), lambda one: one.batch == 2),
    "taskset": (RolloutFilter(groups=GroupFilter(taskset="others")), lambda one: False),
    "several": (
        RolloutFilter(text="step by step", tool="any", reward=(0.9, None), version=(1, None), tokens=(None, 400)),
        lambda one: (
            "step by step" in one.text and bool(one.tools) and (one.reward or 0) >= 0.9
            and one.version >= 1 and one.tokens <= 400
        ),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FILTERS)
def test_each_filter_in_each_order(scene: Scene, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages after each other have every such rollout once, in order, though each page looks at few rows."""
    monkeypatch.setattr(listing, "WINDOW", 150)
    wanted, holds = FILTERS[name]
    for order, (column, direction) in listing.ORDERS.items():
        sign = -1 if direction == "DESC" else 1
        key = {"sequence": "sequence", "reward": "reward", "num_tokens": "tokens"}[column]
        expected = sorted(
            (one for one in scene.said if holds(one) and getattr(one, key) is not None),
            key=lambda one: (sign * getattr(one, key), sign * one.sequence, sign * one.sibling),
        )
        found, after = [], None
        for _ in range(100):
            page = find_rollouts(scene.catalog, scene.now, wanted, order=order, after=after)
            found += page.rollouts
            after = page.after
            if after is None:
                break
        assert [one.row.rollout_id for one in found] == [one.name for one in expected], (order, len(found))
        texts = {one.name: one.text for one in expected}
        assert all(one.said == texts[one.row.rollout_id] and "How many" in one.prompt for one in found)


def test_an_earlier_moment(scene: Scene) -> None:
    groups = find_groups(scene.catalog, scene.now, GroupFilter(), limit=1000)
    decided = {group.group_id: group.decided_at or 0.0 for group in groups}
    then = Moment(at_s=sorted(decided.values())[len(decided) // 2], version=3)
    every, past = (
        find_rollouts(scene.catalog, moment, RolloutFilter(), limit=10_000).rollouts for moment in (scene.now, then)
    )
    names = [one.row.rollout_id for one in every if (one.row.sampled_at or 0.0) <= then.at_s]
    assert [one.row.rollout_id for one in past] == names and 0 < len(past) < len(every)
    assert all(one.row.reward is None for one in past if decided[one.group_id] > then.at_s)
    best = find_rollouts(scene.catalog, then, RolloutFilter(), order="best", limit=10_000).rollouts
    assert len(best) == sum(one.row.reward is not None for one in past)


def test_best_and_worst(scene: Scene) -> None:
    for wanted, holds in (
        (GroupFilter(taskset="word-problems", problem=5), lambda one: one.problem == 5),
        (GroupFilter(batch=1), lambda one: one.batch == 1),
        (7, lambda one: one.sequence == 7),
    ):
        rewards = [one.reward for one in scene.said if holds(one) and one.reward is not None]
        [found] = find_extremes(scene.catalog, scene.now, [wanted])
        assert found.best and found.worst and "How many" in found.prompt
        assert (found.best.row.reward, found.worst.row.reward) == (max(rewards), min(rewards))
    [none] = find_extremes(scene.catalog, scene.now, [GroupFilter(batch=999)])
    assert (none.best, none.worst, none.prompt) == (None, None, "")


def test_problems_by_prompt_and_reward(scene: Scene) -> None:
    every = find_problems(scene.catalog, scene.now, limit=1000)
    which = [GroupFilter(taskset=one.taskset, problem=one.problem) for one in every]
    said_of = dict(zip((one.problem for one in every), find_extremes(scene.catalog, scene.now, which), strict=True))
    with_shells = find_problems(scene.catalog, scene.now, text="SHELLS", limit=1000)
    assert 0 < len(with_shells) < len(every)
    assert {one.problem for one in with_shells} == {n for n, said in said_of.items() if "shells" in said.prompt}
    hard = find_problems(scene.catalog, scene.now, reward=(None, 0.4), order="hardest", limit=1000)
    means = [one.reward_mean for one in every if one.reward_mean is not None and one.reward_mean <= 0.4]
    assert [one.reward_mean for one in hard] == sorted(means)
    for order, opposite in (("seen", "rare"), ("problem", "last")):
        there, back = (find_problems(scene.catalog, scene.now, order=one, limit=1000) for one in (order, opposite))
        assert there == back[::-1]


def test_problems_whose_reference_answer_may_be_wrong(scene: Scene) -> None:
    """Those of which no attempt was right though most give one answer, and no others."""
    stories = text_run.stories(text_run.NUM_PROBLEMS, 1)
    found = find_problems(scene.catalog, scene.now, doubtful=True, limit=1000)
    assert sorted(one.problem for one in found) == sorted(MISLABELLED)
    for one in found:
        tried = [said for said in scene.said if said.problem == one.problem and said.reward is not None]
        right = int(stories[one.problem].answer)
        assert one.num_answers == len(tried) >= 8 and one.answer == str(right + 7) and one.agreed == str(right)
        assert one.num_agreed == sum(f"has {right} " in said.text and said.status != "truncated" for said in tried)
    shares = [one.num_agreed / one.num_answers for one in found if one.num_agreed and one.num_answers]
    assert len(shares) == 2 and shares == sorted(shares, reverse=True)
    assert count_problems(scene.catalog, scene.now, doubtful=True) == 2
    assert count_problems(scene.catalog, scene.now, doubtful=True, version_from=999) == 0
    assert count_problems(scene.catalog, scene.now, doubtful=True, text="no such text") == 0
    every = find_problems(scene.catalog, scene.now, limit=1000)
    assert {(one.agreed, one.num_agreed) for one in every} == {(None, None)} and all(one.answer for one in every)
    told = call("problems", "doubtful", scene.run.folder.path)
    rows = [f"{one.problem} {one.answer} {one.agreed} {one.num_agreed} of {one.num_answers}" for one in found]
    assert [" ".join(line.split()[1:]) for line in told.stdout.splitlines()[1:]] == rows
    listed = json.loads(call("problems", "doubtful", scene.run.folder.path, "--json", "--num", 1).stdout)
    assert [(one["problem"], one["agreed"]) for one in listed] == [(found[0].problem, found[0].agreed)]
    with rftstream.open(scene.run.folder.path) as run:
        assert run.problems(doubtful=True).to_pandas(["problem", "agreed"]).problem.tolist() == [
            one.problem for one in found
        ]


def test_where_nothing_is_doubtful_it_says_of_how_many_problems(tmp_path: Path) -> None:
    make_text_run(tmp_path / "words", 0)
    assert (
        call("problems", "doubtful", tmp_path / "words").stdout == "no doubtful problem, of 48 problems with rewards\n"
    )


@each(
    ("said", "answer"),
    [
        (("12",), "12"),
        (("5 + 7 = 12\n#### 12 \n",), "12"),
        (("#### Step 1\n5 + 7\n#### Result\nThe answer is 12.",), "12"),
        ((r"#### So it is \boxed{12}",), "12"),
        (("<think>it is 11</think>The answer is 12.",), "12"),
        ((r"So \boxed{11}, no: \boxed{12}",), "12"),
        (("I ask.", "The answer is **Paris**."), "paris"),
        ((f"The answer is 11. {'word ' * 200}",), None),
        (("",), None),
        ((), None),
    ],
)
def test_the_answer_of_a_rollout(said: tuple[str, ...], answer: str | None) -> None:
    whole, cut = (
        [Turn(role="assistant", content=text, finish_reason=why) for text in said] for why in ("stop", "length")
    )
    assert answer_in([*whole, Turn(role="tool", content="13")]) == answer and answer_in(cut) is None


def test_versions_are_listed_from_the_first_group_on(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside each other stand the first and the newest, however many groups lie between them."""
    everything = listing.list_versions(scene.catalog, scene.now, GroupFilter())
    monkeypatch.setattr(listing, "NEWEST", 32)
    found = listing.list_versions(scene.catalog, scene.now, GroupFilter())
    assert (found[0], found[-1]) == (everything[0], everything[-1])


def test_samples_of_two_versions(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    [newest, *_, first] = samples.list_evaluated(scene.catalog, "held-out")
    files = {
        version: [json.loads(line) for line in path.read_text().splitlines()]
        for version in (newest, first)
        for path in Path(scene.run.folder.path / "weights/evals/held-out").glob(f"*{version:08}-1-due.jsonl")
    }
    found = samples.find_samples(scene.catalog, "held-out", newest, beside=first, limit=1000)
    for one, line, other in zip(found, files[newest], files[first], strict=True):
        assert one.beside is not None and one.change is not None
        assert (one.prompt, one.answer) == (line["prompt"][0]["content"], line["answer"])
        assert one.completion.splitlines()[-1] == line["completion"][-1]["content"].splitlines()[-1]
        assert (one.reward, one.beside.reward) == (line["reward"], other["reward"])
        assert one.change == pytest.approx(line["reward"] - other["reward"])
    changes = [one.change for one in samples.find_samples(
        scene.catalog, "held-out", newest, beside=first, order="lost", limit=1000)]  # fmt: skip
    assert changes == sorted(changes, key=lambda change: change or 0.0)
    signs = [(change > 0) - (change < 0) for change in changes if change is not None]
    counts = samples.count_changes(scene.catalog, "held-out", newest, first)
    assert counts == tuple(map(signs.count, (1, -1, 0))) and sum(counts) == len(signs) > 0
    name = found[0].prompt.split()[0]
    some = samples.find_samples(scene.catalog, "held-out", newest, text=name, limit=1000)
    assert {one.problem for one in some} == {one.problem for one in found if name in one.prompt}
    best, worst = samples.find_extreme_samples(scene.catalog, "held-out", newest)
    rewards = [line["reward"] for line in files[newest]]
    assert (best.reward, worst.reward) == (max(rewards), min(rewards))
    assert samples.find_samples(scene.catalog, "nothing", newest) == []
    with rftstream.open(scene.run.folder.path) as run:
        assert list(run.samples("held-out")) == samples.find_samples(scene.catalog, "held-out", newest, limit=1000)
        frame = run.samples("held-out", version=first, order="best").head(3).to_pandas()
        rewards = sorted((line["reward"] for line in files[first]), reverse=True)[:3]
        assert frame.reward.tolist() == rewards and set(frame.version) == {first}
        assert {one.problem for one in run.samples("held-out", text=name)} == {one.problem for one in some}
        with pytest.raises(
            rftstream.ConfigError, match=f"has none of version 999; it has those of {first}, .*{newest}"
        ):
            run.samples("held-out", version=999).first()
        monkeypatch.setattr(looking, "PAGE", 2)
        known = iter([[newest, first], *[[first, newest]] * len(found)])  # another version comes between two pages
        monkeypatch.setattr(looking, "list_evaluated", lambda catalog, name: next(known))
        assert [one.version for one in run.samples("held-out")] == [newest] * len(found)


def test_long_texts_lose_their_middle() -> None:
    assert cut_text("x" * (HEAD + TAIL)) == "x" * (HEAD + TAIL)
    cut = cut_text("a" * HEAD + "b" * 10 + "c" * TAIL)
    assert cut.startswith("a" * HEAD + " [") and cut.endswith("] " + "c" * TAIL) and "b" not in cut
