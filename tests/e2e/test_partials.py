"""A rollout of many seconds whose explorer is killed is finished by another one, from where it was saved.

The engine's clock runs fifty times as fast: three hundred of its seconds are six, and two, after which it
saves, are a twenty-fifth of one.
"""

from __future__ import annotations

import signal
import time

import pytest

from rftstream.clock import SystemClock
from rftstream.contracts.rollouts import PartialRollout
from rftstream.contracts.tasks import Task
from rftstream.contracts.versions import VersionName
from rftstream.models.fake_renderer import FakeRenderer
from rftstream.models.spec import ModelSpec
from rftstream.policies.base import Completion, SampleRequest
from rftstream.policies.fake import FakePolicy
from rftstream.roles.explorer.saved.partials import parse_key
from tests.e2e.workplace import RunView, Workplace

pytestmark = [pytest.mark.slow, pytest.mark.law("lost", "twice")]

SPEED = 50.0
EVERY_S, TOKENS_PER_S = 2.0, 10.0

RUN = f"""
[run]
name = "{{name}}"
steps = 1
[model]
path = "fake"
[tasksets.sums]
source = "arithmetic"
[sampling]
max_tokens = 100_000
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
mean_tokens = {{num_tokens}}.0
sigma = 0.0
answer_depends_on = "task"
[transport]
partitions = 1
"""


def pieces_of(view: RunView) -> dict[str, list[PartialRollout]]:
    found: dict[str, list[PartialRollout]] = {}
    for message in view.messages("partials"):
        assert isinstance(message, PartialRollout)
        found.setdefault(message.ids.rollout_id, []).append(message)
    return found


def alone(task: Task, prompt: tuple[int, ...], num_tokens: int) -> Completion:
    """What an engine samples of the task that nobody disturbs."""
    settings = FakePolicy.Config(mean_tokens=float(num_tokens), sigma=0.0, answer_depends_on="task")
    spec = ModelSpec(name="fake", folder=None, dtype="float32", context=None)
    policy = FakePolicy(settings, model=spec, renderer=FakeRenderer(), clock=SystemClock())
    policy.load({}, VersionName(trainer_epoch=0, version=0))
    policy.submit(SampleRequest(request_id="alone", token_ids=prompt, sampling=task.sampling, seed=task.seed,
                                max_tokens=task.sampling.max_tokens))  # fmt: skip
    (completion,) = policy.step()
    return completion


@pytest.mark.sampled(1, "partials")
def test_a_killed_explorers_long_rollouts_are_finished_by_another(place: Workplace) -> None:
    kill_and_go_on(place, "long", 300.0, "session_timeout_s = 2.0\n")


def kill_and_go_on(place: Workplace, name: str, long_s: float, transport: str) -> None:
    """Two rollouts that take so many of the engine's seconds; `transport`: what the run file says of it."""
    num_tokens = int(long_s * TOKENS_PER_S)
    place.write("long.toml", RUN.format(name=name, num_tokens=num_tokens) + transport)
    run = place.start("run", "long.toml", "--json")
    run_dir = f"runs/{name}"
    view = place.view(run_dir)

    first = place.start("worker", "long.toml", "--role", "explorer", "--run-dir", run_dir, "--process", "first")
    enough = num_tokens // 10

    def num_saved() -> int:
        return min((sum(one.num_tokens for one in own) for own in pieces_of(view).values()), default=0)

    place.wait_for(lambda: num_saved() > enough, f"{enough} tokens saved of each")
    first.send(signal.SIGKILL)
    killed_at = time.time()
    first.finish()
    saved = pieces_of(view)
    second = place.start("worker", "long.toml", "--role", "explorer", "--run-dir", run_dir, "--process", "second")
    done = run.finish()
    assert done.code == 0, done.err
    assert second.finish().code == 0

    assert len(saved) == 2
    tasks = {one.ids.rollout_id: one for one in view.messages("tasks") if isinstance(one, Task)}
    for rollout in view.rollouts()[:2]:
        one = rollout.ids.rollout_id
        before, (whole,) = saved[one], rollout.segments
        had = sum(piece.num_tokens for piece in before)
        assert {piece.explorer for piece in before} == {"first"}
        # Nothing that was saved is lost, and what was sampled since is what the clock ran on, at most.
        for field in ("token_ids", "behavior_logprobs", "loss_mask"):
            parts = [getattr(segment, field).data for piece in before for segment in piece.segments]
            assert bytes(getattr(whole, field).data).startswith(b"".join(parts))
        after = pieces_of(view)[one][len(before) :]
        assert f"{one}: goes on from {had} tokens" in view.log_of("second")
        assert {piece.explorer for piece in after} == {"second"}
        lost = TOKENS_PER_S * SPEED * (killed_at - before[-1].saved_at)
        print(f"{one}: {had} tokens in {len(before)} pieces, at most {lost:.0f} lost")
        prompt = tuple(whole.token_ids.numpy()[whole.loss_mask.numpy() == 0].tolist())
        expected = alone(tasks[one], prompt, num_tokens)
        mask = whole.loss_mask.numpy() == 1
        assert rollout.num_tokens == num_tokens
        assert whole.token_ids.numpy()[mask].tobytes() == expected.token_ids.tobytes()
        assert whole.behavior_logprobs.numpy()[mask].tobytes() == expected.behavior_logprobs.tobytes()
    live = {record.key: record.value for record in view.records("partials")}
    finished = {one.ids.rollout_id for one in view.rollouts()}
    left = {parse_key(key or b"")[0] for key, value in live.items() if value is not None}
    assert not left & finished, "no piece of what is finished is left"
    view.assert_nothing_lost()
    place.assert_nobody_left()
