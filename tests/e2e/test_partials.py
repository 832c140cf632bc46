"""A rollout of a thousand seconds whose explorer is killed is finished by another one, from where it was saved.

The engine's clock runs fifty times as fast: a thousand of its seconds are twenty, and two, after which it saves,
are a twenty-fifth of one.
"""

from __future__ import annotations

import signal
import time

import pytest

from rftstream.clock import SystemClock
from rftstream.messages import PartialRollout, Task, VersionName
from rftstream.models import ModelSpec
from rftstream.policies.base import Completion, SampleRequest
from rftstream.policies.fake import FakePolicy
from rftstream.rendering import FakeRenderer
from rftstream.roles.partials import parse_key
from tests.e2e.workplace import RunView, Workplace

pytestmark = pytest.mark.slow

SPEED = 50.0
LONG_S, EVERY_S, TOKENS_PER_S = 1000.0, 2.0, 10.0
NUM_TOKENS = int(LONG_S * TOKENS_PER_S)

RUN = f"""
[run]
name = "long"
steps = 1
[model]
path = "fake"
[tasksets.sums]
source = "arithmetic"
[sampling]
max_tokens = {2 * NUM_TOKENS}
[feeder]
groups_per_batch = 1
group_size = 2
[explorer]
policy = "fake"
count = 0
partial_every_s = {EVERY_S / SPEED}
[trainer]
backend = "fake"
[policies.fake]
tokens_per_s = {TOKENS_PER_S * SPEED}
mean_tokens = {NUM_TOKENS}.0
sigma = 0.0
answer_depends_on = "task"
[transport]
partitions = 1
session_timeout_s = 2.0
"""


def pieces_of(view: RunView) -> dict[str, list[PartialRollout]]:
    found: dict[str, list[PartialRollout]] = {}
    for message in view.messages("partials"):
        assert isinstance(message, PartialRollout)
        found.setdefault(message.ids.rollout_id, []).append(message)
    return found


def alone(task: Task, prompt: tuple[int, ...]) -> Completion:
    """What an engine samples of the task that nobody disturbs."""
    settings = FakePolicy.Config(mean_tokens=float(NUM_TOKENS), sigma=0.0, answer_depends_on="task")
    spec = ModelSpec(name="fake", folder=None, dtype="float32", context=None)
    policy = FakePolicy(settings, model=spec, renderer=FakeRenderer(), clock=SystemClock())
    policy.load({}, VersionName(trainer_epoch=0, version=0))
    policy.submit(SampleRequest(request_id="alone", token_ids=prompt, sampling=task.sampling, seed=task.seed,
                                max_tokens=task.sampling.max_tokens))  # fmt: skip
    (completion,) = policy.step()
    return completion


def test_a_killed_explorers_long_rollouts_are_finished_by_another(place: Workplace) -> None:
    place.write("long.toml", RUN)
    run = place.start("run", "long.toml", "--json")
    view = place.view("runs/long")

    first = place.start("worker", "long.toml", "--role", "explorer", "--run-dir", "runs/long", "--process", "first")
    enough = NUM_TOKENS // 3

    def num_saved() -> int:
        return min((sum(one.num_tokens for one in own) for own in pieces_of(view).values()), default=0)

    place.wait_for(lambda: num_saved() > enough, f"{enough} tokens saved of each")
    first.send(signal.SIGKILL)
    killed_at = time.time()
    first.finish()
    saved = pieces_of(view)
    second = place.start("worker", "long.toml", "--role", "explorer", "--run-dir", "runs/long", "--process", "second")
    done = run.finish()
    assert done.code == 0, done.err
    assert second.finish().code == 0

    assert len(saved) == 2
    tasks = {one.ids.rollout_id: one for one in view.messages("tasks") if isinstance(one, Task)}
    for rollout in view.rollouts()[:2]:
        name = rollout.ids.rollout_id
        before, (whole,) = saved[name], rollout.segments
        had = sum(one.num_tokens for one in before)
        assert {one.explorer for one in before} == {"first"}
        # Nothing that was saved is lost, and what was sampled since is what the clock ran on, at most.
        for field in ("token_ids", "behavior_logprobs", "loss_mask"):
            parts = [getattr(segment, field).data for one in before for segment in one.segments]
            assert getattr(whole, field).data.startswith(b"".join(parts))
        after = pieces_of(view)[name][len(before) :]
        assert f"{name}: goes on from {had} tokens" in view.log_of("second")
        assert {one.explorer for one in after} == {"second"}
        lost = TOKENS_PER_S * SPEED * (killed_at - before[-1].saved_at)
        print(f"{name}: {had} tokens in {len(before)} pieces, at most {lost:.0f} lost")
        prompt = tuple(whole.token_ids.numpy()[whole.loss_mask.numpy() == 0].tolist())
        expected = alone(tasks[name], prompt)
        mask = whole.loss_mask.numpy() == 1
        assert rollout.num_tokens == NUM_TOKENS
        assert whole.token_ids.numpy()[mask].tobytes() == expected.token_ids.tobytes()
        assert whole.behavior_logprobs.numpy()[mask].tobytes() == expected.behavior_logprobs.tobytes()
    live = {record.key: record.value for record in view.records("partials")}
    finished = {one.ids.rollout_id for one in view.rollouts()}
    left = {parse_key(key or b"")[0] for key, value in live.items() if value is not None}
    assert not left & finished, "no piece of what is finished is left"
    view.assert_nothing_lost()
    place.assert_nobody_left()
