"""Episodes of several agents: each role has its own segments and reward, and is compared with that of the siblings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts.batches import Experience
from rftstream.contracts.outcomes import GroupOutcome
from rftstream.contracts.rollouts import Rollout
from rftstream.contracts.versions import StepRecord
from rftstream.roles.explorer.model_calls import CallAnswer
from rftstream.testing import RoleDriver
from tests.flow.agents import AGENTS, Agent, kill_and_restart, user
from tests.flow.scene import Scene
from tests.flow.test_verifier import letters_of, verified_of


def opened(tmp_path: Path, **settings: Any) -> tuple[Scene, RoleDriver, list[Agent]]:
    """A run with one group of two tasks, and an agent for each."""
    scene = Scene(tmp_path, **{**AGENTS, "feeder__groups_per_batch": 1, **settings})
    scene.announce(0)
    tasks = scene.admit(0, environment="agent")
    explorer = RoleDriver(scene, "explorer")
    explorer.work()
    return scene, explorer, [Agent(explorer, task.ids.rollout_id) for task in tasks]


def play(agent: Agent, *roles: str, **end: Any) -> None:
    for number, role in enumerate(roles):
        answer = agent.ask(user(f"{number}+1="), model=f"policy:{role}" if role else "policy").answer
        assert isinstance(answer, CallAnswer)
    agent.end(**end)


def rollouts(scene: Scene) -> list[Rollout]:
    return [one for one in scene.messages("rollouts") if isinstance(one, Rollout)]


BY_ENVIRONMENT = {"tasksets__sums__reward": "environment"}


@pytest.mark.parametrize("kills", [False, True])
def test_a_segment_is_of_one_role(tmp_path: Path, kills: bool) -> None:
    """Also if a role goes on from what another one said, and if the explorer dies between the calls."""
    scene, explorer, (agent, _) = opened(tmp_path)

    def ask(role: str, *messages: dict[str, Any]) -> dict[str, Any]:
        said = agent.ask(*messages, model=f"policy:{role}" if role else "policy").message
        if kills:
            kill_and_restart(explorer)
        return said

    first = ask("solver", user("1+1="))
    sure = ask("critic", user("1+1="), first, user("2+2="))
    ask("solver", user("1+1="), first, user("3+3="))
    ask("critic", user("1+1="), first, user("2+2="), sure, user("4+4="))
    ask("", user("5+5="))
    agent.end(reward=1.0)
    (rollout,) = rollouts(scene)
    assert [(call.segment, call.opened) for call in rollout.calls] == [
        (0, "first"), (1, "role"), (0, ""), (1, ""), (2, "new_conversation"),
    ]  # fmt: skip
    assert [segment.role for segment in rollout.segments] == ["solver", "critic", ""]
    solver, critic = rollout.segments[:2]
    end = rollout.calls[0].start + rollout.calls[0].count
    assert critic.token_ids.numpy()[:end].tolist() == solver.token_ids.numpy()[:end].tolist(), "as they were sampled"
    assert not critic.loss_mask.numpy()[:end].any(), "and trained once"
    assert rollout.num_tokens == sum(int(one.loss_mask.numpy().sum()) for one in rollout.segments)


def test_rewards_of_roles_come_to_the_trainer(tmp_path: Path) -> None:
    """Though their mean is the same for both siblings, so that no reward of a whole rollout would teach anything."""
    scene, _, agents = opened(tmp_path, buffer__zero_variance="replace", **BY_ENVIRONMENT)
    play(agents[0], "left", "right", "judge", roles={"left": 1.0, "right": -1.0, "judge": None})
    play(agents[1], "left", "right", roles={"left": -1.0, "right": 1.0, "judge": None})
    for role in ("verifier", "buffer", "trainer"):
        RoleDriver(scene, role).work()
    verdicts = [one.verdict for one in verified_of(scene).values()]
    assert [(one.reward, one.roles) for one in verdicts if one] == [
        (0.0, {"left": 1.0, "right": -1.0, "judge": None}), (0.0, {"left": -1.0, "right": 1.0}),
    ]  # fmt: skip
    experiences = [one for one in scene.messages("batches") if isinstance(one, Experience)]
    assert [one.roles for one in experiences] == [one.roles for one in verdicts if one]
    (outcome,) = (one for one in scene.messages("outcomes") if isinstance(one, GroupOutcome))
    assert [one.roles["left"] for one in outcome.rollouts] == [1.0, -1.0]
    step = [one for one in scene.messages("steps") if isinstance(one, StepRecord)][-1].metrics
    assert (step["zero_variance_share"], step["role/left"], step["role_signal/left"]) == (0.0, 0.0, 1.0)
    assert step["advantage_max"] == pytest.approx(2**-0.5) and step["reward"] == 0.0
    assert step["trained_rollouts"] == 2 and step["roles_alone"] == 0


@pytest.mark.law("lost", "unscorable")
@pytest.mark.parametrize(
    ("roles", "end", "sentence"),
    [
        (("solver", "critic"), {"roles": {"solver": 1.0}}, "environment: rewarded the roles solver, and not critic; "
         "expected a reward for each role of the rollout, or None for one that is not to be trained"),
        (("", ""), {"roles": {"solver": 1.0}}, "environment: rewarded the roles solver, but no call of the rollout has "
         "a role; let the agent name it as its model, such as policy:solver"),
        (("solver",), {"reward": 1.0, "roles": {"solver": None}},
         "environment: none of the roles solver has a reward, expected at least one"),
    ],
)  # fmt: skip
def test_rewards_that_do_not_fit_to_the_roles(
    tmp_path: Path, roles: tuple[str, ...], end: dict[str, Any], sentence: str
) -> None:
    """Nothing is lost, and nothing is made up: the rollout has no reward, and says why."""
    scene, _, agents = opened(tmp_path, **BY_ENVIRONMENT)
    play(agents[0], *roles, **end)
    RoleDriver(scene, "verifier").work()
    (verified,) = verified_of(scene).values()
    assert (verified.verdict, verified.reason, verified.detail) == (None, "error", f"{sentence} (tried 3 times)")
    assert verified.rollout == rollouts(scene)[0]
    assert [one.reason for one in letters_of(scene)] == ["error"]
