"""A run whose problems a model makes while it goes on: they are learned from."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from rftstream.contracts.problems import NewProblem, RejectedProblem
from tests.e2e.workplace import RunView, Workplace
from tests.flow.writers import is_request, served, terms

pytestmark = pytest.mark.slow

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
