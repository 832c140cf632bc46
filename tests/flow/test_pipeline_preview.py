"""A preview of operators does what feeder and buffer did with the same operators, and tells it by reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rftstream.config.data_pipelines.pipeline_files import with_pipelines_of
from rftstream.config.loader import replace
from rftstream.contracts.outcomes import GroupOutcome
from rftstream.errors import ConfigError
from rftstream.queries.decisions.pipeline_preview import Preview, preview
from rftstream.testing import RoleDriver
from tests.flow.scene import Scene
from tests.flow.test_pipelines import buffering, check_balance, feeding, indexes_of, outcomes_of, own, put_group


def looked(scene: Scene, num: int = 1000, **settings: Any) -> Preview:
    config = replace(scene.config, **settings) if settings else scene.config
    return preview(config, scene.log.connect("preview"), num=num)


def test_problems_are_decided_as_the_feeder_decides_them(tmp_path: Path) -> None:
    source = {"source": "arithmetic", "passes": 1, "options": {"size": 40, "high": 20}}
    operators = ({"op": "length", "max_characters": 4}, {"op": "regex", "skip": "^1", "field": "answer"}, own("Sizes"))
    scene = feeding(tmp_path, *operators, tasksets={"sums": source}, feeder__groups_per_batch=100)
    RoleDriver(scene, "feeder").work()
    drawn = check_balance(scene)
    found = preview(scene.config, None, num=1000)
    (counts,) = found.tasks.values()
    told = {one.label: {reason: effect.count for (action, reason), effect in one.effects.items() if action == "skip"}
            for one in counts.counts}  # fmt: skip
    assert {name: reasons for name, reasons in told.items() if reasons} == drawn.skipped["sums"]
    assert counts.counts[-1].effects["change", ""].count == drawn.changed["sums"][operators[-1]["op"]]
    assert (counts.num_in, counts.num_out) == (40, drawn.admitted)
    for one, after in zip(counts.counts, counts.counts[1:], strict=False):
        assert one.num_out == after.num_in
    example = counts.counts[0].effects["skip", "too long"].examples
    assert len(example) == 3
    assert all(len(one["text"]) > 4 for one in example)
    assert "length, skip (too long), for example:" in found.to_text()
    json.dumps(found.to_json(), allow_nan=False)


def test_a_sample_is_what_the_feeder_draws_first(tmp_path: Path) -> None:
    scene = feeding(tmp_path, own("Sizes"), feeder__groups_per_batch=3)
    RoleDriver(scene, "feeder").work()
    found = preview(scene.config, None, num=3)
    examples = found.tasks["sums"].counts[0].effects["change", ""].examples
    assert [one["problem"] for one in examples] == [f"sums/{index}" for index in indexes_of(scene)][:3]
    assert "the first 3 of" in found.to_text()


def test_recorded_groups_are_decided_as_the_buffer_did(tmp_path: Path) -> None:
    operators = (own("ByFacts"), {"op": "truncated"}, own("Shaper"), own("Masker"))
    scene = buffering(tmp_path, *operators, feeder__groups_per_batch=2, feeder__group_size=3)
    buffer = RoleDriver(scene, "buffer")
    for sequence in range(30):
        truncated = ((), (1,), (0, 2))[sequence % 3]
        put_group(scene, sequence, (0.0, 1.0, 1.0), truncated=truncated, num_tokens=(9, 9, 9))
        if sequence % 5 == 4:
            buffer.work()
    outcomes = [one for one in outcomes_of(scene) if isinstance(one, GroupOutcome)]
    found = looked(scene)
    counts = found.groups["sums"]
    assert found.num_recorded == counts.num_in == len(outcomes) > 20
    assert found.num_same == len(outcomes), "each decision computed again from the log is equal"
    assert len({one.seen for one in outcomes}) > 3
    assert len({one.reason for one in outcomes}) > 4
    assert counts.num_out == sum(one.result == "batched" for one in outcomes)
    siblings = sum(len(d.siblings) for one in outcomes for d in one.decisions if d.operator == "truncated")
    assert counts.counts[1].effects["reject", "a limit ended it"].num_siblings == siblings > 0

    other = looked(scene, pipeline=[{"op": "truncated"}])
    assert 0 < other.num_same < len(outcomes)
    newest = looked(scene, num=4)
    assert newest.groups["sums"].num_in == 4
    assert newest.num_same == 4, "the facts are those of the whole log before"


def test_failing_operators_are_named_with_the_problem(tmp_path: Path) -> None:
    scene = buffering(tmp_path, own("Raises"), own("RaisesLate"), feeder__groups_per_batch=1)
    for sequence in range(3):
        put_group(scene, sequence, (0.0, 1.0))
    RoleDriver(scene, "buffer").work()
    found = looked(scene, num=3)
    assert any("pipeline.1: sums/0/0/0: the operator" in one and "ValueError: no sums/0/0/0" in one
               for one in found.failures)  # fmt: skip
    assert any(one.startswith("pipeline.0: sums/0/") for one in found.failures)
    assert found.groups["sums"].counts[0].effects["reject", "raised ValueError"].count == 1


def test_what_rejects_everything_is_said_so(tmp_path: Path) -> None:
    scene = buffering(tmp_path, {"op": "regex", "skip": "."})
    found = preview(scene.config, None, num=5)
    assert found.tasks["sums"].num_out == 0
    assert "nothing is left" in found.to_text()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[pipeline]]\nop = "lenght"', "did you mean 'length'"),
        ('[tasksets.sum]\npipeline = [{op = "length"}]', "tasksets.sum: unknown; .*did you mean 'sums'"),
        ('[trainer]\nlr = 1.0\n[[pipeline]]\nop = "length"', "trainer: found beside the operators"),
        ('[tasksets.sums]\nsource = "x"', r"tasksets\.sums\.source: found beside the operators"),
        ("", "found no operators"),
        ("[[pipeline]", "pipes.toml"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "pipes.toml"
    file.write_text(text)
    config = Scene(tmp_path, pipeline=[{"op": "length"}]).config
    with pytest.raises(ConfigError, match=said):
        preview(with_pipelines_of(config, file), None, num=2)


def test_a_file_replaces_the_operators_of_a_run(tmp_path: Path) -> None:
    file = tmp_path / "pipes.toml"
    file.write_text('[[tasksets.sums.pipeline]]\nop = "length"\nmax_characters = 3\n')
    config = Scene(tmp_path, pipeline=[{"op": "truncated"}]).config
    new = with_pipelines_of(config, file)
    assert new.pipeline == ()
    assert new.tasksets["sums"].pipeline == ({"op": "length", "max_characters": 3},)
    with pytest.raises(ConfigError, match="no such file"):
        with_pipelines_of(config, tmp_path / "nowhere.toml")
