"""Runs whose problems a model makes while they go on: learned from, each traced to its parent, no twin after a kill."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from rftstream.contracts.problems import NewProblem, RejectedProblem
from rftstream.contracts.tasks import Task
from tests.e2e.workplace import RunView, Workplace
from tests.flow.writers import is_request, served, terms

pytestmark = pytest.mark.slow

GROWING = """
[run]
name = "growing"
steps = 100000
[model]
path = "fake"
[tasksets.seeds]
source = "log:problems"
weight = 0.0
[tasksets.more]
source = "log:problems"
[sampling]
max_tokens = 8
[feeder]
groups_per_batch = 4
group_size = 4
max_staleness = 1
[explorer]
policy = "fake"
[synthesiser]
read = "problems"
tasksets = ["seeds"]
into = "more"
per_parent = 3
max_concurrent = 1
ask = "server"
check_samples = 2
server = { url = "URL", model = "writer" }
[trainer]
backend = "fake"
checkpoint_every = 20
[transport]
partitions = 4
"""

LEARNED = """
[run]
name = "learned"
steps = 160
[model]
dtype = "float32"
[model.make]
characters = "0123456789+="
context = 16
[tasksets.sums]
source = "jsonl:sums.jsonl"
[tasksets.more]
source = "log:problems"
weight = 2.0
[evaluations.swapped]
source = "jsonl:swapped.jsonl"
every = 80
n = 4
[sampling]
max_tokens = 3
[feeder]
groups_per_batch = 24
group_size = 8
max_staleness = 1
[explorer]
max_concurrent = 512
[synthesiser]
ask = "server"
server = { url = "URL", model = "writer" }
[trainer]
lr = 1.5e-3
lr_schedule = "cosine"
adam_betas = [0.9, 0.99]
checkpoint_every = 80
[transport]
partitions = 4
"""


def made(view: RunView) -> list[NewProblem]:
    """What joined `more`."""
    return [one for one in view.messages("problems") if isinstance(one, NewProblem) and one.taskset == "more"]


def rows(pairs: list[tuple[int, int]]) -> list[dict[str, Any]]:
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]


def assert_no_twin(view: RunView) -> None:
    names = [one.problem_id for one in view.messages("problems") if isinstance(one, NewProblem | RejectedProblem)]
    assert sorted(names) == sorted(set(names))
    view.assert_nothing_lost()


def nodes(tree: dict[str, Any]) -> list[dict[str, Any]]:
    return [tree, *itertools.chain.from_iterable(map(nodes, tree.get("children", ())))]


@pytest.mark.heavy("a run of all roles, one of which is killed while it asks a server")
@pytest.mark.law("twice", "lineage")
def test_what_a_model_makes_of_seeds_is_all_that_is_learned_from(place: Workplace) -> None:
    """Nothing is there at first, and the feeder waits. Then somebody adds seeds, and the synthesiser is killed while it
    makes problems of them."""
    numbers = itertools.count(1)

    def writer(asked: str) -> str:
        """Other words each time, so that what is made twice would show."""
        left, right = terms(asked)
        return json.dumps({"problem": f"Sum {'i' * next(numbers)}: {right} + {left} = "}) if is_request(asked) else (
            str(left + right)
        )  # fmt: skip

    with served(writer) as server:
        place.write("growing.toml", GROWING.replace("URL", server.url))
        process = place.start("run", "growing.toml", "--json")
        view = place.view("runs/growing")
        place.wait_for(lambda: view.control().manifest, "the run's manifest")
        before = place.look("status", "runs/growing", "--json").result
        assert before["growing"]["tasksets"]["more"] == {"joined": 0, "drawn": 0, "waits": True}
        place.write_lines("seeds.jsonl", rows([(a, b) for a in range(8) for b in (1, 2)]))
        added = place.look("problems", "add", "runs/growing", "--from", "seeds.jsonl", "--taskset", "seeds")
        assert added.code == 0, added.err
        for count in (2, 8):
            place.wait_for(lambda count=count: len(made(view)) >= count, f"{count} problems")
            place.wait_for(lambda: place.worker("synthesiser-0"), "a synthesiser")
            place.kill_worker("synthesiser-0")
        place.wait_for(lambda: view.curve().version >= 24, "24 steps")
        assert place.look("drain", "runs/growing").code == 0
        done = process.finish()
        assert done.code == 0, done.err

    result = done.result
    assert result["reward_last"] > result["reward_first"] + 0.2, "nothing else was there to learn from"
    assert {task.ids.taskset for task in view.messages("tasks") if isinstance(task, Task)} == {"more"}
    assert 8 <= len(made(view)) <= 3 * 16, "the run ends when its steps are done, made or not"
    assert {one.parent for one in made(view)} <= {f"seeds/{number}" for number in range(16)}
    assert_no_twin(view)
    checked = place.look("audit", "runs/growing", "--decisions", "--json")
    assert checked.code == 0, checked.err

    newest = max((task.ids for task in view.messages("tasks") if isinstance(task, Task)), key=lambda ids: ids.sequence)
    traced = place.look("trace", "runs/growing", newest.group_id, "--json").result
    (problem,) = (node for node in nodes(traced) if node["kind"] == "problem")
    (parent,) = problem["children"]
    number = int(newest.group_id.split("/")[2])
    assert (problem["name"], parent["kind"], parent["name"]) == (f"more/{number}", "parent", made(view)[number].parent)
    assert "by writer" in place.look("trace", "runs/growing", problem["name"]).out
    listed = place.look("problems", "list", "runs/growing", "--json").result
    assert listed["joined"] == {"seeds": 16, "more": len(made(view))}
    place.assert_nobody_left()


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_model_learns_paraphrases_that_only_the_synthesiser_made(place: Workplace) -> None:
    """The taskset has sums whose first term is the smaller one; the others are made of them, and evaluated."""

    def writer(asked: str) -> str:
        left, right = terms(asked)
        return json.dumps({"problem": f"{right}+{left}="}) if is_request(asked) else str(left + right)

    pairs = list(itertools.combinations(range(5), 2))
    place.write_lines("sums.jsonl", rows(pairs))
    place.write_lines("swapped.jsonl", rows([(b, a) for a, b in pairs]))
    with served(writer) as server:
        place.write("learned.toml", LEARNED.replace("URL", server.url))
        done = place.call("run", "learned.toml", "--json", timeout_s=1200)
    assert done.code == 0, done.err
    view = place.view("runs/learned")
    assert_no_twin(view)
    joined = {one.problem.messages[-1].content for one in made(view)}
    assert joined == {f"{b}+{a}=" for a, b in pairs}
    status = place.look("status", "runs/learned", "--json").result
    swapped = status["evaluations"]["swapped"]
    assert swapped["newest"]["mean"] > 0.7, swapped
