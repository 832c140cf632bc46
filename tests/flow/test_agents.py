"""Rollouts that agents make: calls become segments, are on the log before they are answered, and survive restarts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts import codec
from rftstream.contracts.ids import next_attempt
from rftstream.contracts.records import Record
from rftstream.contracts.rollouts import PartialRollout, Posted, Rollout, RolloutStatus
from rftstream.contracts.tasks import RolloutIds
from rftstream.roles.explorer.model_calls import (
    AgentBegins,
    CallAnswer,
    Delivered,
    Refusal,
    RolloutEnded,
    SessionGranted,
    SessionWanted,
)
from rftstream.testing import RoleDriver
from rftstream.transport.memory.clients import MemoryMember
from tests.flow.agents import AGENTS, AWAY_S, Agent, Try, kill_and_restart, session, step_of, user
from tests.flow.scene import Scene, without_version

RETRY = {"x-stainless-retry-count": "1"}


def opened(tmp_path: Path, **settings: Any) -> tuple[Scene, RoleDriver, Agent]:
    """A run with one group of two tasks; the agent of the first."""
    scene = Scene(tmp_path, **{**AGENTS, **settings})
    scene.announce(0)
    tasks = scene.admit(0, environment="agent")
    explorer = RoleDriver(scene, "explorer")
    explorer.work()
    return scene, explorer, Agent(explorer, tasks[0].ids.rollout_id)


def the_rollout(scene: Scene) -> Rollout:
    (rollout,) = (one for one in scene.messages("rollouts") if isinstance(one, Rollout))
    return rollout


def pieces(scene: Scene) -> list[PartialRollout]:
    return [one for one in scene.messages("partials") if isinstance(one, PartialRollout)]


def trained_tokens(rollout: Rollout) -> int:
    return sum(int(segment.loss_mask.numpy().sum()) for segment in rollout.segments)


# --------------------------------------------------------------------------------------------- segments


def test_a_conversation_is_one_segment_and_its_reward_is_posted(tmp_path: Path) -> None:
    scene, _, agent = opened(tmp_path)
    first = agent.ask(user("1+1="))
    second = agent.ask(user("1+1="), first.message, user("2+2="))
    ended = agent.end(reward=0.5, parts={"right": 0.5}, metrics={"steps": 2.0})
    assert ended.answer == RolloutEnded(rollout_id=agent.rollout_id, status="completed")
    rollout = the_rollout(scene)
    (segment,) = rollout.segments
    assert rollout.status is RolloutStatus.completed
    assert without_version(rollout.posted) == Posted(reward=0.5, parts={"right": 0.5}, source="agent")
    assert rollout.metrics == {"steps": 2.0}
    assert [(call.number, call.segment, call.opened) for call in rollout.calls] == [(0, 0, "first"), (1, 0, "")]
    assert [turn.role for turn in rollout.turns] == ["user", "assistant", "user", "assistant"]
    assert rollout.num_tokens == trained_tokens(rollout) == sum(call.count for call in rollout.calls)
    ids, mask = segment.token_ids.numpy(), segment.loss_mask.numpy()
    for call, answer in zip(rollout.calls, (first, second), strict=True):
        sampled = ids[call.start : call.start + call.count]
        assert bytes(sampled.tolist()).rstrip(b"\0").decode() == answer.message["content"]
        assert mask[call.start : call.start + call.count].all()
    assert bytes(ids.tolist()).decode().startswith("1+1=")


def test_a_branch_repeats_tokens_and_masks_them(tmp_path: Path) -> None:
    scene, _, agent = opened(tmp_path)
    first = agent.ask(user("1+1="))
    agent.ask(user("1+1="), first.message, user("2+2="))
    agent.ask(user("1+1="), first.message, user("3+3="))
    agent.end()
    rollout = the_rollout(scene)
    assert [call.opened for call in rollout.calls] == ["first", "", "branch"]
    trunk, branch = rollout.segments
    end = rollout.calls[0].start + rollout.calls[0].count
    assert branch.token_ids.numpy()[:end].tolist() == trunk.token_ids.numpy()[:end].tolist()
    assert not branch.loss_mask.numpy()[:end].any() and not branch.behavior_logprobs.numpy()[:end].any()
    assert rollout.num_tokens == trained_tokens(rollout)


def test_sub_agents_and_rewritten_histories_have_segments_of_their_own(tmp_path: Path) -> None:
    scene, _, agent = opened(tmp_path)
    main = agent.ask(user("1+1="))
    other = agent.ask({"role": "system", "content": "you check"}, user("1+1="))
    agent.ask(user("1+1="), main.message, user("2+2="))
    agent.ask({"role": "system", "content": "you check"}, user("1+1="), other.message, user("sure?"))
    agent.ask(user("1+1="), {"role": "assistant", "content": "it never said this"}, user("2+2="))
    agent.ask(user("1+1="), main.message, user("2+2="), tools=[{"type": "function", "function": {"name": "add"}}])
    agent.end()
    rollout = the_rollout(scene)
    assert [(call.segment, call.opened) for call in rollout.calls] == [
        (0, "first"),
        (1, "new_conversation"),
        (0, ""),
        (1, ""),
        (2, "unknown_history"),
        (3, "unknown_history"),
    ]
    assert rollout.num_tokens == trained_tokens(rollout)


def test_calls_at_the_same_time_do_not_share_a_segment(tmp_path: Path) -> None:
    scene, explorer, agent = opened(tmp_path)
    first = agent.ask(user("1+1="))
    tries = [agent.send(user("1+1="), first.message, user(f"{n}+{n}=")) for n in range(3)]
    explorer.work()
    assert all(isinstance(one.answer, CallAnswer) for one in tries)
    agent.end()
    rollout = the_rollout(scene)
    assert sorted(call.opened for call in rollout.calls[1:]) == ["", "branch", "branch"]
    assert len({call.segment for call in rollout.calls[1:]}) == 3


# --------------------------------------------------------------------------------------------- commit, then answer


@pytest.mark.law("lost")
def test_a_call_is_on_the_log_before_it_is_answered(tmp_path: Path) -> None:
    scene, explorer, agent = opened(tmp_path)
    found = agent.send(user("1+1="))
    while found.answer is None:
        assert not pieces(scene)
        explorer.tick()
        scene.clock.advance(0.001)
    (piece,) = pieces(scene)
    assert isinstance(found.answer, CallAnswer) and piece.saved_calls[0].answer == found.answer.body


@pytest.mark.law("twice")
@pytest.mark.parametrize("num_ticks", range(6))
def test_a_retry_after_a_kill_gets_the_same_bytes_and_nothing_is_sampled_twice(tmp_path: Path, num_ticks: int) -> None:
    """Killed after any slice: before the call was sampled, before the commit, between commit and answer, after."""
    scene, explorer, agent = opened(tmp_path)
    first = agent.ask(user("1+1="))
    told = agent.send(user("1+1="), first.message, user("2+2="))
    for _ in range(num_ticks):
        explorer.tick()
    num_recorded = len(pieces(scene))
    kill_and_restart(explorer)
    again = agent.ask(user("1+1="), first.message, user("2+2="), headers=RETRY)
    if told.answer is not None:
        assert again.answer == told.answer
    if num_recorded == 2:
        (saved,) = pieces(scene)[1].saved_calls
        assert isinstance(again.answer, CallAnswer) and again.answer.body == saved.answer
    third = agent.ask(user("1+1="), first.message, user("2+2="), again.message, user("3+3="))
    agent.end(reward=1.0)
    rollout = the_rollout(scene)
    assert [(call.number, call.segment) for call in rollout.calls] == [(0, 0), (1, 0), (2, 0)]
    assert third.body["id"].endswith("/call/2")
    assert rollout.num_tokens == trained_tokens(rollout)


@pytest.mark.law("lost", "derived")
def test_a_call_that_was_not_committed_is_sampled_again_alike(tmp_path: Path) -> None:
    texts = []
    for number in range(2):
        _, explorer, agent = opened(tmp_path / str(number))
        agent.send(user("7+8="))
        if number:
            kill_and_restart(explorer)
        texts.append(agent.ask(user("7+8="), headers=RETRY).message)
    assert texts[0] == texts[1]


def test_the_record_takes_its_pieces_back(tmp_path: Path) -> None:
    scene, _, agent = opened(tmp_path)
    first = agent.ask(user("1+1="))
    agent.ask(user("1+1="), first.message, user("2+2="))
    agent.end()
    keys = [(record.key, record.value is None) for record in scene.records("partials")]
    assert keys[2:] == [(key, True) for key, _ in keys[:2]]


# --------------------------------------------------------------------------------------------- repeated requests


def test_an_equal_request_is_a_new_sample_once_its_answer_was_delivered(tmp_path: Path) -> None:
    scene, _, agent = opened(tmp_path)
    for _ in range(3):
        agent.ask(user("1+1="))
    agent.end()
    rollout = the_rollout(scene)
    assert [call.opened for call in rollout.calls] == ["first", "new_conversation", "new_conversation"]
    assert len({call.request_digest for call in rollout.calls}) == 1


def test_an_answer_that_nobody_got_answers_the_next_equal_request(tmp_path: Path) -> None:
    _, explorer, agent = opened(tmp_path)
    lost = agent.send(user("1+1="))
    lost.request.is_gone = True
    explorer.work()
    again = agent.ask(user("1+1="))
    assert again.answer == lost.answer
    assert agent.ask(user("1+1="), again.message, user("2+2=")).body["id"].endswith("/call/1")
    assert agent.ask(user("1+1=")).body["id"].endswith("/call/2")


def test_a_retry_joins_the_call_that_is_being_sampled(tmp_path: Path) -> None:
    scene, explorer, agent = opened(tmp_path)
    first, second = agent.send(user("1+1=")), agent.send(user("1+1="), headers=RETRY)
    explorer.work()
    assert first.answer == second.answer and len(pieces(scene)) == 1


@pytest.mark.law("twice")
def test_an_idempotency_key_gives_the_same_answer_also_after_a_restart(tmp_path: Path) -> None:
    scene, explorer, agent = opened(tmp_path)
    first = agent.ask(user("1+1="), headers={"idempotency-key": "a"})
    other = agent.ask(user("1+1="), headers={"idempotency-key": "b"})
    assert first.answer != other.answer
    kill_and_restart(explorer)
    assert agent.ask(user("1+1="), headers={"idempotency-key": "a"}).answer == first.answer
    refused = agent.ask(user("2+2="), headers={"idempotency-key": "a"}).refusal
    assert refused.status == 400 and refused.sentence.startswith("idempotency-key: it was given to another request")
    assert len(pieces(scene)) == 2


# --------------------------------------------------------------------------------------------- the end


def test_calls_after_the_end_are_told_so_and_an_end_may_be_told_twice(tmp_path: Path) -> None:
    scene, _, agent = opened(tmp_path)
    agent.ask(user("1+1="))
    assert agent.end(reward=1.0).answer == agent.end(reward=1.0).answer
    other = agent.end(reward=0.0).refusal
    assert other.status == 409 and "has ended with another reward" in other.sentence
    assert agent.ask(user("1+1=")).refusal.status == 409
    assert without_version(the_rollout(scene).posted) == Posted(reward=1.0, source="agent")


def test_a_silent_agent_ends_as_one_truncated_record(tmp_path: Path) -> None:
    scene, explorer, agent = opened(tmp_path, explorer__idle_timeout_s=30.0)
    agent.ask(user("1+1="))
    scene.clock.advance(29.0)
    explorer.work()
    assert not scene.messages("rollouts")
    scene.clock.advance(1.1)
    explorer.work()
    rollout = the_rollout(scene)
    assert rollout.status is RolloutStatus.truncated and len(rollout.calls) == 1 and rollout.posted is None
    assert "silent for 30 s" in str(rollout.error)


def test_silence_says_nothing_of_an_agent_whose_runner_keeps_time(tmp_path: Path) -> None:
    """Its place is made, or its work is tested."""
    scene, explorer, agent = opened(tmp_path, explorer__idle_timeout_s=30.0, explorer__rollout_timeout_s=5000.0)
    agent.step.inbox.put(AgentBegins(rollout_id=agent.rollout_id, launch="", keeps_time=True))
    explorer.work()
    scene.clock.advance(2000.0)
    agent.ask(user("1+1="))
    scene.clock.advance(2000.0)
    explorer.work()
    assert not [one for one in scene.messages("rollouts") if one.ids.rollout_id == agent.rollout_id]
    agent.end(reward=1.0)
    assert the_rollout(scene).status is RolloutStatus.completed


def test_the_time_of_a_rollout_is_up_though_its_agent_came_late(tmp_path: Path) -> None:
    scene, explorer, agent = opened(tmp_path, explorer__rollout_timeout_s=90.0)
    scene.clock.advance(60.0)
    explorer.work()
    agent.ask(user("1+1="))
    scene.clock.advance(29.0)
    explorer.work()
    assert not scene.messages("rollouts")
    scene.clock.advance(1.1)
    explorer.work()
    assert "the rollout took 90 s" in str(the_rollout(scene).error)


def test_agents_that_fail_or_do_nothing(tmp_path: Path) -> None:
    scene, explorer, agent = opened(tmp_path)
    other = Agent(explorer, agent.rollout_id[:-1] + "1")
    agent.end(error="KeyError: 'x'")
    other.end(reward=1.0)
    rollouts = [one for one in scene.messages("rollouts") if isinstance(one, Rollout)]
    assert [one.status for one in rollouts] == [RolloutStatus.failed] * 2
    assert {one.error for one in rollouts} == {"the agent failed: KeyError: 'x'", "the agent ended without a call"}


def test_an_agent_that_is_cut_short_ends_as_one_truncated_record(tmp_path: Path) -> None:
    scene, explorer, agent = opened(tmp_path)
    other = Agent(explorer, agent.rollout_id[:-1] + "1")
    agent.ask(user("1+1="))
    agent.end(cut_short="it took too long")
    other.end(cut_short="it took too long")
    truncated, failed = (one for one in scene.messages("rollouts") if isinstance(one, Rollout))
    assert truncated.status is RolloutStatus.truncated and len(truncated.calls) == 1 and truncated.posted is None
    assert truncated.error == "it took too long"
    assert failed.status is RolloutStatus.failed and failed.error == "it took too long, and made no call"


@pytest.mark.law("lost", "twice")
def test_an_agent_that_begins_again_gets_the_recorded_answers(tmp_path: Path) -> None:
    scene, explorer, agent = opened(tmp_path)
    first = agent.ask(user("1+1="))
    second = agent.ask(user("1+1="), first.message, user("2+2="))
    waits = agent.send(user("1+1="), second.message, user("3+3="))
    explorer.tick()
    agent.step.inbox.put(AgentBegins(rollout_id=agent.rollout_id, launch=""))
    assert agent.ask(user("1+1=")).answer == first.answer
    assert agent.ask(user("1+1="), first.message, user("2+2=")).answer == second.answer
    third = agent.ask(user("1+1="), second.message, user("3+3="))
    assert third.answer == waits.answer and third.body["id"].endswith("/call/2")
    assert agent.ask(user("1+1=")).body["id"].endswith("/call/3")
    agent.end(reward=1.0)
    rollout = the_rollout(scene)
    assert rollout.status is RolloutStatus.completed and rollout.num_tokens == trained_tokens(rollout)


def test_a_launch_that_was_given_up_has_nothing_to_say(tmp_path: Path) -> None:
    """A function that blocks goes on when it was given up: it must not mix its calls into those of the next one."""
    scene, explorer, agent = opened(tmp_path)
    old, new = (Agent(explorer, agent.rollout_id, launch) for launch in ("a1", "a2"))
    assert old.ask(user("1+1=")).refusal.status == 409, "it has not begun"
    agent.step.inbox.put(AgentBegins(rollout_id=agent.rollout_id, launch="a1"))
    first = old.ask(user("1+1="))
    assert agent.ask(user("1+1=")).refusal.status == 409, "a key without a launch is of another agent"
    agent.step.inbox.put(AgentBegins(rollout_id=agent.rollout_id, launch="a2"))
    agent.step.inbox.put(Delivered(rollout_id=agent.rollout_id, launch="a1", number=0))
    assert new.ask(user("1+1=")).answer == first.answer, "what the old one was told does not count"
    for _ in range(2):
        late = old.ask(user("1+1="), first.message, user("2+2="))
        assert late.refusal.status == 409 and late.refusal.retry_after_s is None
        assert "started again since" in late.refusal.sentence
    assert old.end(reward=0.25).refusal.status == 409
    new.ask(user("1+1="), first.message, user("3+3="))
    new.end(reward=1.0)
    rollout = the_rollout(scene)
    assert rollout.posted is not None and rollout.posted.reward == 1.0
    assert len(rollout.calls) == 2 and "2+2=" not in [turn.content for turn in rollout.turns]


def test_a_rollout_that_is_nowhere_near_is_moving(tmp_path: Path) -> None:
    _, explorer, _ = opened(tmp_path)
    refusal = Agent(explorer, "sums/0/99/0/0").ask(user("1+1=")).refusal
    assert refusal.status == 503 and refusal.retry_after_s is not None


# --------------------------------------------------------------------------------------------- limits


def test_limits_are_told(tmp_path: Path) -> None:
    scene, explorer, agent = opened(tmp_path, explorer__max_calls=2, explorer__max_calls_at_once=1)
    first, second = agent.send(user("1+1=")), agent.send(user("2+2="))
    explorer.work()
    assert isinstance(first.answer, CallAnswer)
    assert second.refusal.status == 429 and "1 calls of this rollout at once" in second.refusal.sentence
    agent.ask(user("2+2="))
    third = agent.ask(user("3+3=")).refusal
    assert third.status == 400 and third.sentence.startswith("the rollout has made 2 calls, expected at most 2")
    agent.end()
    assert the_rollout(scene).status is RolloutStatus.completed


def test_an_agent_that_fails_of_a_limit_is_truncated(tmp_path: Path) -> None:
    """Frameworks raise when they are refused, or when an answer is cut off. That is no mistake of theirs."""
    scene, _, agent = opened(tmp_path, explorer__max_calls=1)
    agent.ask(user("1+1="))
    assert agent.ask(user("2+2=")).refusal.status == 400
    agent.end(error="BadRequestError: 400")
    rollout = the_rollout(scene)
    assert rollout.status is RolloutStatus.truncated and len(rollout.calls) == 1 and rollout.posted is None
    assert rollout.error == (
        "the rollout has made 1 calls, expected at most 1, and then the agent failed: BadRequestError: 400"
    )


def test_an_agent_that_fails_of_an_answer_that_was_cut_off_is_truncated(tmp_path: Path) -> None:
    scene, explorer, agent = opened(tmp_path, policies__fake={"mean_tokens": 30.0, "sigma": 0.0})
    cut = agent.ask(user("1+1="), max_completion_tokens=2)
    assert cut.body["choices"][0]["finish_reason"] == "length"
    kill_and_restart(explorer)
    agent.end(error="ModelBehaviorError: incomplete")
    assert the_rollout(scene).status is RolloutStatus.truncated
    whole = Agent(explorer, agent.rollout_id[:-1] + "1")
    whole.ask(user("1+1="), max_completion_tokens=2)
    whole.ask(user("2+2="))
    whole.end(error="KeyError: 'x'")
    other = next(one for one in scene.messages("rollouts") if isinstance(one, Rollout) and one.ids.sibling == 1)
    assert other.status is RolloutStatus.failed, "it went on after that"


def test_what_cannot_be_answered_is_refused(tmp_path: Path) -> None:
    _, _, agent = opened(tmp_path, model__context=20)
    assert "a prompt of 40 tokens leaves no room" in agent.ask(user("1" * 40)).refusal.sentence
    first = agent.ask(user("1+1="))
    assert "the last message is the assistant's" in agent.ask(user("1+1="), first.message).refusal.sentence


# --------------------------------------------------------------------------------------------- sessions


@pytest.mark.law("lost", "twice")
def test_a_session_is_given_once_and_outlives_the_explorer(tmp_path: Path) -> None:
    scene, explorer, agent = opened(tmp_path)
    first, again, other = session(explorer, "a"), session(explorer, "a"), session(explorer, "b")
    assert isinstance(first.answer, SessionGranted) and first.answer == again.answer
    assert isinstance(other.answer, SessionGranted) and other.answer.rollout_id != first.answer.rollout_id
    assert session(explorer).refusal.status == 503
    kill_and_restart(explorer)
    assert session(explorer, "a").answer == first.answer
    assert session(explorer, "c").refusal.status == 503
    agent = Agent(explorer, first.answer.rollout_id)
    agent.ask(user("1+1="))
    agent.end(reward=1.0)
    rollout = the_rollout(scene)
    assert rollout.ids.rollout_id == first.answer.rollout_id and rollout.num_tokens == trained_tokens(rollout)
    assert rollout.problem is not None and rollout.problem.answer is not None
    assert "answer" not in first.answer.problem


@pytest.mark.parametrize("partition", [0, 1])
def test_the_name_of_a_session_waits_for_the_task_that_was_given_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partition: int
) -> None:
    """The explorer is killed after a session was saved, before its agent was told. Its successor takes one task at a
    time in hand: free ones of the other partition come first in one of the two cases."""
    scene = Scene(tmp_path, **{**AGENTS, "transport__partitions": 2})
    scene.announce(0)
    for sequence in range(8):
        scene.admit(sequence, environment="agent")
    explorer = RoleDriver(scene, "explorer")
    explorer.work()
    wanted = {ids.rollout_id for ids in ids_in(scene, partition)}
    assert 0 < len(wanted) < 16
    given = session(explorer, "the agent").answer
    assert isinstance(given, SessionGranted)
    while given.rollout_id not in wanted:
        Agent(explorer, given.rollout_id).end(error="another one is wanted")
        given = session(explorer, "the agent").answer
        assert isinstance(given, SessionGranted)
    for sequence in range(8, 16):
        scene.admit(sequence, environment="agent")
    one_at_a_time(monkeypatch)
    scene.clock.advance(AWAY_S)
    explorer.restart()
    tries: list[Try] = []
    while not tries or isinstance(tries[-1].answer, Refusal):
        tries.append(Try("", SessionWanted(name="the agent")))
        step_of(explorer).inbox.put(tries[-1].request)
        while tries[-1].answer is None:
            scene.clock.advance(max(explorer.tick(), 0.001))
    assert tries[-1].answer == given
    assert {one.refusal.status for one in tries[:-1]} <= {503}


def ids_in(scene: Scene, partition: int) -> list[RolloutIds]:
    """The tasks in a partition."""
    records = scene.records("tasks")
    found = [codec.ids_from_headers(record) for record in records if record.partition == partition]
    return [one for one in found if one is not None]


def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let members deliver one record in a poll."""
    poll = MemoryMember.poll

    def slowly(self: MemoryMember, max_records: int = 1000, max_bytes: int = 16 << 20) -> list[Record]:
        return poll(self, min(1, max_records), max_bytes)

    monkeypatch.setattr(MemoryMember, "poll", slowly)


# --------------------------------------------------------------------------------------------- weights, leaving


@pytest.mark.law("staleness")
def test_calls_wait_for_weights_that_are_new_enough(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **AGENTS)
    scene.announce(0)
    (task, _) = scene.admit(0, min_version=1, environment="agent")
    explorer = RoleDriver(scene, "explorer")
    explorer.work()
    agent = Agent(explorer, task.ids.rollout_id)
    found = agent.ask(user("1+1="))
    assert found.answer is None
    scene.announce(1)
    explorer.work()
    assert isinstance(found.answer, CallAnswer)
    agent.end()
    assert [span.version for span in the_rollout(scene).segments[0].versions] == [1]


@pytest.mark.law("lost")
def test_an_explorer_that_leaves_hands_its_agents_on(tmp_path: Path) -> None:
    scene, explorer, agent = opened(tmp_path, policies__fake={"tokens_per_s": 10.0, "mean_tokens": 40.0, "sigma": 0.0})
    first = agent.ask(user("1+1="))
    waits = agent.send(user("1+1="), first.message, user("2+2="))
    explorer.tick()
    explorer.service.drain()
    agent.step.save(leaving=True)
    late = agent.send(user("3+3="))
    agent.step.save(leaving=True)
    assert late.refusal.status == 503, "though others may go on for long"
    explorer.stop()
    assert waits.refusal.status == 503
    assert not scene.messages("rollouts")
    successor = RoleDriver(scene, "explorer", process="successor")
    successor.work()
    agent.explorer = successor
    agent.ask(user("1+1="), first.message, user("2+2="), headers=RETRY)
    agent.end(reward=1.0)
    assert [call.segment for call in the_rollout(scene).calls] == [0, 0]


def test_tasks_of_environments_are_sampled_beside(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **AGENTS)
    scene.announce(0)
    (task, _), plain = scene.admit(0, environment="agent"), scene.admit(1)
    explorer = RoleDriver(scene, "explorer")
    agent = Agent(explorer, task.ids.rollout_id)
    explorer.tick()
    agent.ask(user("1+1="))
    agent.end()
    rollouts = {one.ids.rollout_id: one for one in scene.messages("rollouts") if isinstance(one, Rollout)}
    assert rollouts.keys() == {task.ids.rollout_id, *(one.ids.rollout_id for one in plain)}
    assert {one.status for one in rollouts.values()} == {RolloutStatus.completed}
    assert {rollout_id for rollout_id, one in rollouts.items() if one.calls} == {task.ids.rollout_id}


def test_a_stored_rollout_that_may_not_be_taken_is_made_by_an_agent_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path, **AGENTS)
    scene.announce(1)
    first, second = scene.siblings(0)
    scene.put("rollouts", scene.rollout(first, version=0), scene.rollout(second, version=1))
    base = scene.admit(1, environment="agent")[0]
    ids = [replace(one, group_id=(group := next_attempt(one.group_id)), rollout_id=f"{group}/{one.sibling}",
                   sequence=5, min_version=1) for one in (first, second)]  # fmt: skip
    scene.put("tasks", *(replace(base, ids=one, stored_rollout=f"rollouts[0]@{i}") for i, one in enumerate(ids)))
    explorer, fetched = RoleDriver(scene, "explorer"), []
    step: Any = explorer.service.step
    fetch = step._fetch_rollout
    step._fetch_rollout = lambda where: (fetched.append(where), fetch(where))[1]
    explorer.work()
    assert sorted(fetched) == ["rollouts[0]@0", "rollouts[0]@1"], "each once"
    found = {one.ids.rollout_id: one for one in scene.messages("rollouts") if isinstance(one, Rollout)}
    assert ids[0].rollout_id not in found and found[ids[1].rollout_id].status is RolloutStatus.completed
    agent = Agent(explorer, ids[0].rollout_id)
    agent.ask(user("1+1="))
    assert agent.end().answer == RolloutEnded(rollout_id=agent.rollout_id, status="completed")


def test_a_rollout_that_takes_too_long_ends_with_what_it_has(tmp_path: Path) -> None:
    slow = {"tokens_per_s": 1.0, "mean_tokens": 40.0, "sigma": 0.0}
    scene, explorer, agent = opened(tmp_path, explorer__rollout_timeout_s=90.0, policies__fake=slow)
    first = agent.ask(user("1+1="))
    late = agent.send(user("1+1="), first.message, user("2+2="))
    other = agent.send({"role": "system", "content": "2"}, user("1+1="))
    explorer.work()
    third = agent.send(user("3+3="))
    explorer.work()
    rollout = the_rollout(scene)
    assert rollout.status is RolloutStatus.truncated and "took 90 s" in str(rollout.error)
    assert third.refusal.status == 409 and isinstance(late.answer, CallAnswer) and isinstance(other.answer, CallAnswer)
    assert len(rollout.calls) == 3 and rollout.num_tokens == trained_tokens(rollout)


def test_tool_calls_are_served_recognized_and_recorded(tmp_path: Path) -> None:
    """The answer is taken apart by the renderer; what the agent sends back continues the tokens that were sampled."""
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    scene, _, agent = opened(tmp_path)
    first = agent.ask(user("1+1="), tools=[tool], tool_choice="required", temperature=0.0)
    agent.ask(user("1+1="), first.message, {"role": "tool", "tool_call_id": "x", "content": "2"}, tools=[tool])
    agent.end()
    rollout = the_rollout(scene)
    assert [call.opened for call in rollout.calls] == ["first", ""]
    assert rollout.calls[0].asked == {"temperature": 0.0, "tool_choice": "required"}
    assert len({call.tools_digest for call in rollout.calls}) == 1
