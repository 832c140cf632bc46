"""The card of a trained model: what it says of the run, what it keeps of the base model's, and what it never says."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.models.spec import ModelSpec
from rftstream.queries.curves.model_card import card_text, write_model_card
from rftstream.service.control_view import read_control
from rftstream.service.role import Log
from rftstream.testing import Simulation
from rftstream.transport.memory.transport import MemoryLog
from tests.unit.synthetic import SyntheticLog

BASE_CARD = "---\nlicense: apache-2.0\nlanguage:\n- en\ntags: [theirs]\n---\n\n# Base\n"


def run_config(folder: Path, **more: object) -> RunConfig:
    (folder / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return loader.from_dict({
        "run": {"name": "carded", "steps": 2}, "model": {"path": "fake"},
        "explorer": {"policy": "fake"}, "trainer": {"backend": "fake", "algorithm": "rloo"},
        "tasksets": {"rows": {"source": f"jsonl:{folder}/rows.jsonl", "reward": [
            {"name": "exact"}, {"name": "length_penalty", "weight": 0.5, "soft": 2, "hard": 4}]}},
        "evaluations": {"rows": {"source": f"jsonl:{folder}/rows.jsonl", "n": 2, "k": [1, 2]}},
        "feeder": {"groups_per_batch": 2, "group_size": 2}, "sampling": {"max_tokens": 4},
        "rewards": {"judge": {"api_key": "very-secret-key", "url": "http://me:pass@judge/v1"}}, **more,
    })  # fmt: skip


@pytest.fixture
def base(tmp_path: Path) -> ModelSpec:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "README.md").write_text(BASE_CARD)
    return ModelSpec(name="fake", folder=folder, dtype="bfloat16", context=None)


def test_what_a_card_says(tmp_path: Path, base: ModelSpec) -> None:
    config = run_config(tmp_path)
    simulation = Simulation(config, folder=tmp_path / "run")
    simulation.run()
    log = Log(simulation.transport())
    write_model_card(log, config, base, tmp_path, 2)
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    card = ModelCard(text)
    assert card.data.to_dict()["license"] == "apache-2.0"
    assert card.data.to_dict()["language"] == ["en"]
    assert {"rftstream", "rloo"} <= set(card.data.tags)
    assert "theirs" not in card.data.tags
    assert card.data.eval_results is not None
    assert {(one.dataset_name, one.metric_type) for one in card.data.eval_results} >= {
        ("rows", "mean"), ("rows", "pass@2")}  # fmt: skip
    assert "Version 2 of the run `carded`" in text
    manifest = read_control(log.transport).manifest
    assert manifest is not None
    assert manifest.digests["taskset.rows"] in text
    assert "`jsonl:rows.jsonl`" in text
    assert "1 exact + 0.5 length_penalty" in text
    for never in ("very-secret-key", "me:pass", str(tmp_path)):
        assert never not in text
    assert sorted(path.name for path in tmp_path.glob(".README*")) == []


def test_a_card_asks_as_the_run_did(tmp_path: Path, base: ModelSpec) -> None:
    config = run_config(tmp_path)
    simulation = Simulation(config, folder=tmp_path / "run")
    rows = config.tasksets["rows"]
    said = replace(rows, system='Say "2" {alone}.')
    one, two = {"rows": said}, {"rows": said, "more": rows}
    sampling = replace(config.sampling, stop=("\n",))
    log = Log(simulation.transport())
    text = card_text(log, replace(config, tasksets=one, sampling=sampling), base, 0)
    program = text.partition("```python\n")[2].partition("```")[0]
    made = [one for one in ast.parse(program).body if isinstance(one, ast.Assign)]
    calls = {ast.unparse(one.targets[0]): one.value for one in made}
    assert ast.literal_eval(calls["chat"]) == [
        {"role": "system", "content": 'Say "2" {alone}.'}, {"role": "user", "content": "PROMPT"}]  # fmt: skip
    assert "max_new_tokens=4, stop_strings=['\\n'], tokenizer=tokenizer)" in ast.unparse(calls["answer"])
    other = card_text(log, replace(config, tasksets=two), base, 0)
    assert 'chat = [{"role": "user", "content": "PROMPT"}]' in other and "stop_strings" not in other


def test_an_older_version_has_its_own_figures(tmp_path: Path, base: ModelSpec) -> None:
    config = run_config(tmp_path)
    simulation = Simulation(config, folder=tmp_path / "run")
    simulation.run()
    text = card_text(Log(simulation.transport()), config, base, 0)
    assert "Version 0 of the run" in text
    assert "| `rows` | `jsonl:rows.jsonl` | 0 |" in text


def test_a_model_of_the_hub_is_named(tmp_path: Path, base: ModelSpec) -> None:
    simulation = Simulation(run_config(tmp_path), folder=tmp_path / "run")
    simulation.run()
    log = Log(simulation.transport())
    card = ModelCard(card_text(log, run_config(tmp_path, model={"path": "owner/small-model"}), base, 2))
    assert card.data.base_model == "owner/small-model"
    own = ModelCard(card_text(log, run_config(tmp_path, model={"path": str(tmp_path / "base")}), base, 2))
    assert own.data.base_model is None
    assert "| trained from | `base` |" in own.text


def test_a_card_says_who_else_rewarded_and_which_environment_answered(tmp_path: Path, base: ModelSpec) -> None:
    """A reward that was mended after version 3 is told from version 4 on, and of one turn no environment is named."""
    config = run_config(tmp_path)
    synthetic = SyntheticLog(MemoryLog(lambda: 0.0, marks=True).connect("test"))
    synthetic.step(0, resumed=True)
    for version in range(1, 6):
        synthetic.trained[version] = version
        synthetic.step(version, metrics={"reward": 1.0}, scorers={"rows": f"exact {1 + (version > 3)}"})
    log = Log(synthetic.transport)
    assert "exact 2" not in card_text(log, config, base, 3)
    text = card_text(log, config, base, 4)
    assert "- rows: exact 1 -> exact 2 since version 4; older rewards do not compare\n" in text
    assert "| environment |" not in text
    games = {"rows": replace(config.tasksets["rows"], environment={"name": "tools", "max_turns": 2})}
    assert "| `jsonl:rows.jsonl` | `tools` | `1 exact" in card_text(log, replace(config, tasksets=games), base, 4)
