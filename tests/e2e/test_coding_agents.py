"""Claude Code, Codex and Vercel's AI SDK as they come from npm, in one run. The log has what they say that they did."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from rftstream.contracts.rollouts import Rollout, RolloutStatus
from tests.e2e.test_frameworks import EXAMPLES, NOTED
from tests.e2e.workplace import Workplace
from tests.made import made_once
from tests.unit.environments.hosts.venvs import CACHE

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(3600)]

PACKAGES = (
    "@anthropic-ai/claude-code@2.1.197", "@openai/codex@0.171.0",
    "ai@6.0.326", "@ai-sdk/openai@3.0.141", "@ai-sdk/anthropic@3.0.140", "zod@4.6.7",
)  # fmt: skip
DIALECTS = {
    "claude-code": "anthropic",
    "codex": "responses",
    "responses": "responses",
    "chat": "chat",
    "messages": "anthropic",
}
NOTING = """
import my_coding_agents


async def noting(work, problem, base_url, api_key, seed, **more):
    found = await work(problem, base_url, api_key, seed, **more)
    note(seed=seed, **found)
    return found


async def claude_code(problem, base_url, api_key, seed):
    return await noting(my_coding_agents.claude_code, problem, base_url, api_key, seed)


async def codex(problem, base_url, api_key, seed):
    return await noting(my_coding_agents.codex, problem, base_url, api_key, seed)


async def ai_sdk(problem, base_url, api_key, seed, options):
    return await noting(my_coding_agents.ai_sdk, problem, base_url, api_key, seed, options=options)
"""


def install(folder: Path) -> None:
    """Install the clients, with the scripts that fetch their binaries."""
    (folder / "package.json").write_text("{}")
    subprocess.run(["npm", "install", "--no-fund", "--no-audit", *PACKAGES], cwd=folder, check=True)


@pytest.fixture
def clients(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    modules = made_once(CACHE, "coding-agents", install) / "node_modules"
    monkeypatch.setenv("PATH", f"{modules / '.bin'}{os.pathsep}{os.environ['PATH']}")
    for name in ("my_coding_agents.py", "my_ai_sdk.mjs", "coding_agents.toml"):
        shutil.copy(EXAMPLES / name, place.folder)
    (place.folder / "node_modules").symlink_to(modules)
    shutil.copy(Path(__file__).with_name("scripted.py"), place.folder)
    place.write("noted.py", NOTED.partition("def smolagents")[0] + NOTING)
    return place


@pytest.mark.law("lost", "twice")
def test_ten_tasks_of_each_client_are_on_the_log_as_they_were(clients: Workplace) -> None:
    place = clients
    names = list(DIALECTS)
    targets = {name: name.replace("-", "_") if name in ("claude-code", "codex") else "ai_sdk" for name in names}
    tasksets = "".join(
        f'[tasksets.{name}]\nsource = "arithmetic"\nreward = "environment"\nenvironment = {{ name = "hosted_agent", '
        f'target = "noted:{targets[name]}", options.api = "{name}" }}\n'
        for name in names
    )
    run, _, rest = (place.folder / "coding_agents.toml").read_text().partition("[tasksets.claude-code]")
    settings = rest[rest.index("[sampling]") :].replace('"fake"', '"scripted:Scripted"', 1)
    settings = settings.replace("groups_per_batch = 3", f"groups_per_batch = {len(names)}")
    place.write("coding.toml", run.replace("steps = 4", "steps = 5") + tasksets + settings)
    done = place.call("run", "coding.toml", "--json")
    assert done.code == 0, done.err
    view = place.view("runs/coding_agents")
    view.assert_nothing_lost()
    seeds = {task.ids.rollout_id: task.seed for task in view.messages("tasks") if hasattr(task, "seed")}
    notes = {one["seed"]: one for one in map(json.loads, (place.folder / "notes.jsonl").read_text().splitlines())}
    found: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in view.rollouts():
        if rollout.status is RolloutStatus.skipped:
            continue
        assert rollout.status is RolloutStatus.completed, (rollout.ids.rollout_id, rollout.error)
        found[rollout.ids.taskset].append(rollout)
        assert rollout.posted is not None
        assert rollout.posted.reward == notes[seeds[rollout.ids.rollout_id]]["reward"]
        assert rollout.num_tokens == sum(call.count for call in rollout.calls)
        assert [call.opened for call in rollout.calls] == ["first", *[""] * (len(rollout.calls) - 1)], "one segment"
        assert {call.dialect for call in rollout.calls} == {DIALECTS[rollout.ids.taskset]}
    assert {name: len(rollouts) >= 10 for name, rollouts in found.items()} == dict.fromkeys(names, True)
    for rollouts in found.values():
        assert all(len(one.calls) == 2 for one in rollouts), "the tool was called"
        answers = [turn.content.strip() for one in rollouts for turn in one.turns if turn.role == "tool"]
        assert all(re.search(r"\b\d+\b", answer) and "rror" not in answer for answer in answers), answers
        assert {one.posted.reward for one in rollouts if one.posted is not None} == {0.0, 1.0}
