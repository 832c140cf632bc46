"""A whole run in one process: each taskset, and each evaluation, is asked through its own chat template."""

from __future__ import annotations

from pathlib import Path

import pytest

from rftstream.config.loader import from_dict
from rftstream.contracts.rollouts import Rollout
from rftstream.contracts.versions import EvalResult
from rftstream.testing import Simulation

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"


def test_each_taskset_is_asked_through_its_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)  # parts that need no torch
    (tmp_path / "x.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    source = {"source": "jsonl:x.jsonl"}
    config = from_dict({
        "run": {"name": "t", "steps": 2}, "base": str(tmp_path), "sampling": {"max_tokens": 2},
        "model": {"make": {"characters": "0123456789+=", "context": 16, "width": 16}, "dtype": "float32",
                  "chat_template": "{{ messages[0].content }}"},
        "tasksets": {"plain": source, "own": {**source, "chat_template": "{{ n }}{{ messages[0].content }}",
                                              "chat_template_kwargs": {"n": 77}}},
        "evaluations": {"held": source, "refused": {**source, "chat_template": "{{ raise_exception('never') }}"}},
        "explorer": {"policy": "my_policies:Uniform"},
        "trainer": {"backend": "my_backends:Frozen", "algorithm": "my_algorithms:Imitate"},
        "feeder": {"groups_per_batch": 2, "group_size": 2}, "transport": {"partitions": 2},
    })  # fmt: skip
    simulation = Simulation(config, folder=tmp_path / "run")
    simulation.run()
    assert simulation.audit().fine
    lengths = {
        (one.ids.taskset, len(segment.token_ids.numpy()) - one.num_tokens)
        for one in simulation.messages("rollouts") if isinstance(one, Rollout) for segment in one.segments
    }  # fmt: skip
    assert lengths == {("plain", 4), ("own", 6)}
    unscored = {
        (one.evaluation, one.num_unscored) for one in simulation.messages("evals") if isinstance(one, EvalResult)
    }
    assert unscored == {("held", 0), ("refused", 1)}
