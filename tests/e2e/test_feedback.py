"""People over a whole run, by commands: votes, the ledger, pairs for DPO, other verdicts, a replay."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rftstream.contracts.batches import Experience
from rftstream.contracts.demonstrations import Demonstration
from rftstream.contracts.verdicts import VerifiedRollout
from tests.e2e.test_resume import PATIENCE_S
from tests.e2e.workplace import FAKE, Workplace

pytestmark = pytest.mark.slow

DPO = """
[run]
name = "dpo"
[model.make]
characters = "0123456789+-*/= ?"
layers = 1
width = 32
heads = 2
[experts]
source = "pairs.jsonl"
per_batch = 4
[trainer]
algorithm = "dpo"
[transport]
partitions = 2
"""


def batched(place: Workplace) -> list[Experience]:
    return [one for one in place.view("runs/tiny").messages("batches") if isinstance(one, Experience)]


def called(place: Workplace, *arguments: Any) -> Any:
    """Runs by processes of their own, all else in this one."""
    if arguments[0] in ("run", "resume") and "--no-workers" not in arguments:
        done = place.call(*arguments, timeout_s=PATIENCE_S)
    else:
        done = place.look(*arguments)
    assert done.code == 0, done.err
    return done


@pytest.mark.timeout(8 * PATIENCE_S)
def test_votes_on_a_finished_run_and_what_comes_of_them(place: Workplace) -> None:
    place.write("tiny.toml", FAKE.replace("steps = 6", "steps = 8") + "[feedback]\nquorum = 2\nscale = [1, 5]\n")
    called(place, "run", "tiny.toml", "--json")
    experiences = batched(place)
    late = next(one for one in experiences if one.batch_sequence == 3)
    votes = [
        {"rollout": late.ids.rollout_id, "by": who, "label": 0.5, "at": 1.0} for who in ("Ada Lovelace", "Bob")
    ] + [{"rollout": late.ids.rollout_id, "by": "Ada Lovelace", "correction": "42"}]
    groups: dict[str, list[str]] = {}
    texts = {
        one.ids.rollout_id: one.rollout.turns[-1].content
        for one in place.view("runs/tiny").messages("verified")
        if isinstance(one, VerifiedRollout) and one.rollout is not None and one.rollout.turns
    }
    for one in experiences:
        groups.setdefault(one.ids.group_id, []).append(one.ids.rollout_id)
    pairs = 0
    for rollouts in groups.values():
        first, second = sorted(rollouts)[:2]
        if texts[first] == texts[second]:
            continue
        pairs += 1
        better = "first" if len(texts[first]) <= len(texts[second]) else "second"
        for who in ("Ada Lovelace", "Bob"):
            votes.append({"rollouts": [first, second], "by": who, "choice": better, "at": 1.0})
    place.write_lines("votes.jsonl", votes)
    assert pairs >= 5

    added = called(place, "feedback", "add", "runs/tiny", "--from", "votes.jsonl", "--json").result
    assert (added["new"], added["known"], added["annotators"]) == (len(votes), 0, 2)
    again = called(place, "feedback", "add", "runs/tiny", "--from", "votes.jsonl", "--json").result
    assert (again["new"], again["known"]) == (0, len(votes)), "each once"
    assert not any(b"Lovelace" in (one.value or b"") for one in place.view("runs/tiny").records("feedback"))
    judged = {one["question_id"]: one for one in called(place, "feedback", "judgements", "runs/tiny", "--json").result}
    label = judged[f"label/{late.ids.rollout_id}"]
    assert (label["applied"], label["batch_sequence"], label["recorded"]) == ("correction", 3, False)

    shown = called(place, "trace", "runs/tiny", late.ids.rollout_id).out
    assert "batch 3" in shown.replace("batch: 3", "batch 3")
    assert "v4" in shown
    report = called(place, "audit", "runs/tiny", "--json").result
    assert report["people"] == {"votes": len(votes), "judged": {}, "pending": len(votes), "questions": 0}

    # -------------------------------------------------------------------------- the run goes on, and records them
    called(place, "resume", "runs/tiny", "--json", "--set", "run.steps=10")
    report = called(place, "audit", "runs/tiny", "--json").result
    assert report["people"]["judged"] == {"counted": len(votes)}
    assert report["people"]["pending"] == 0
    recorded = called(place, "feedback", "judgements", "runs/tiny", "--json").result
    assert {(one["question_id"], one["applied"], one["recorded"]) for one in recorded} == {
        (one["question_id"], one["applied"], True) for one in judged.values()
    }

    # -------------------------------------------------------------------------- the ledger, and a replay without them
    ledger = called(place, "feedback", "taints", "runs/tiny", "--json").result
    assert (ledger["batches"], ledger["first_version"], ledger["versions"]) == ([3], 4, 7)
    assert ledger["rollouts"][0]["trained_reward"] == late.reward
    assert ledger["rollouts"][0]["reward"] == 0.5
    replayed = called(place, "replay", "runs/tiny", "--without", "feedback", "--into", "runs/mended", "--json").result
    assert replayed["left_out"] == {"3": {"rollouts": 1}}
    assert replayed["version"] == 10
    mended = called(place, "audit", "runs/mended", "--json").result
    assert (mended["balanced"], mended["rollouts"]["filtered"]) == (True, 1)

    # -------------------------------------------------------------------------- other verdicts
    called(place, "rescore", "runs/tiny", "--reward", "feedback", "--into", "runs/judged", "--json")
    scored = {one.ids.rollout_id: one.verdict for one in place.view("runs/judged").messages("verified")
              if isinstance(one, VerifiedRollout)}  # fmt: skip
    verdict = scored[late.ids.rollout_id]
    assert verdict is not None
    assert (verdict.reward, verdict.parts["human"]) == (0.5, 0.5)
    assert sum(one is not None and "human" in one.parts for one in scored.values()) == 1

    # -------------------------------------------------------------------------- pairs and corrected answers
    wrote = called(place, "feedback", "export", "runs/tiny", "--what", "pairs", "--to", "pairs.jsonl", "--json").result
    assert wrote["rows"] == pairs
    called(place, "feedback", "export", "runs/tiny", "--what", "corrections", "--to", "chats.jsonl")
    (chat,) = [json.loads(line) for line in (place.folder / "chats.jsonl").read_text().splitlines()]
    assert chat["messages"][-1] == {"role": "assistant", "content": "42"}
    place.write("dpo.toml", DPO)
    called(place, "run", "dpo.toml", "--no-workers")
    loaded = [one.preference for one in place.view("runs/dpo").messages("experts") if isinstance(one, Demonstration)]
    answers = [(one.chosen[-1].content, one.rejected[-1].content) for one in loaded if one is not None]
    assert len(answers) == len(loaded) == pairs, "DPO learns from such pairs in test_experts"
    assert all(len(chosen) <= len(rejected) and chosen != rejected for chosen, rejected in answers), "as was voted"
