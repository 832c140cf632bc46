"""What `check` says of the disk that a run needs, and of operators that see all problems."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rftstream.contracts.tasks import ChatMessage, Problem, Sampling
from rftstream.errors import ConfigError
from rftstream.preflight.checks.check import check
from rftstream.preflight.estimate import ModelSizes, num_rollouts, rollout_bytes
from rftstream.queries.formatting import size
from tests.unit.preflight import test_check
from tests.unit.preflight.test_check import Write, errors, fine, write_rows

write = test_check.write  # the fixture


def test_rollouts_of_a_run_by_steps_or_by_passes(write: Write) -> None:
    assert num_rollouts(write(), {"train": 2}) == 10 * 8 * 8
    assert num_rollouts(write(tasksets__train__passes=3), {"train": 2}) == 3 * 2 * 8
    hours = {"run": {"name": "demo", "hours": 1.0}}
    assert num_rollouts(write(**hours), {"train": 2}) is None
    assert "unknown length" in fine(write(**hours)).to_text()


def test_a_rollout_takes_its_tokens_three_times() -> None:
    problem = Problem(messages=(ChatMessage(role="user", content="x"),))

    def num_bytes(max_tokens: int, context: int | None = None, saves: bool = False) -> int:
        return rollout_bytes(
            problem, 10, Sampling(max_tokens=max_tokens), context=context, group_size=8, run="demo", saves=saves
        )

    more = num_bytes(2_000) - num_bytes(1_000)
    # ids, logprobs and mask on rollouts, verified and batches; the text, four bytes a token, on two of them
    assert more == pytest.approx(3 * 9 * 1_000 + 2 * 4 * 1_000, rel=0.01)
    saved = num_bytes(1_000, saves=True) - num_bytes(1_000)
    assert 9 * 1_010 < saved < 9 * 1_010 + 1_000, "saved, they are there once more"
    assert num_bytes(19) < num_bytes(1_000, context=30) < num_bytes(22), "no more than the context has room for"


def test_what_saving_costs(write: Write) -> None:
    saving, not_saving = fine(write()), fine(write(explorer__partial_every_s=0.0))
    assert saving.disk is not None
    assert not_saving.disk is not None
    assert "of it to go on from" in saving.to_text()
    assert "of it to go on from" not in not_saving.to_text()
    without = saving.disk.bytes_per_rollout - saving.disk.saved_bytes
    assert without == pytest.approx(not_saving.disk.bytes_per_rollout, abs=1)  # each of them is rounded up
    assert not_saving.disk.saved_bytes == 0


def test_filtered_groups_come_on_top(write: Write) -> None:
    plain, replaced = fine(write()), fine(write(buffer__zero_variance="replace"))
    assert plain.disk is not None and replaced.disk is not None and replaced.disk.log_bytes is not None
    assert (plain.disk.filters, replaced.disk.filters) == ((), ("buffer.zero_variance",))
    twice = size(replaced.disk.total_bytes + replaced.disk.log_bytes)
    said = f"free, without groups that buffer.zero_variance may filter: where half of all are, {twice}\n"
    assert all(said in text for text in (replaced.to_text(), replaced.to_short_text()))
    assert "may filter" not in plain.to_text()
    assert [" beside those of groups" in one.to_short_text() for one in (plain, replaced)] == [False, True]


def test_the_newest_records_stand_in_the_journal_once_more(write: Write) -> None:
    """As much as all of them at most; other logs have no such journal."""
    few, many = (fine(write(run__steps=steps)).disk for steps in (2, 10**6))
    assert few is not None and many is not None and few.log_bytes is not None and many.log_bytes is not None
    assert (few.journal_bytes, many.journal_bytes) == (few.log_bytes, 64 << 20)
    assert many.total_bytes == many.log_bytes + (64 << 20) + many.weights_bytes + many.snapshot_bytes
    away = check(write(transport__kind="memory")).disk
    assert away is not None and away.journal_bytes == 0


@pytest.mark.parametrize(("settings", "share", "deltas"), [
    ({"model__dtype": "bfloat16", "trainer__lr": 5e-6}, 1 / 335, 98),
    ({"model__dtype": "bfloat16", "trainer__lr": 1e-5}, 1 / 205, 98),
    ({"model__dtype": "bfloat16", "trainer__lr": 1e-8}, 1 / 621, 98),
    ({"model__dtype": "bfloat16", "trainer__lr": 1e-2}, 1, 98),
    ({"model__dtype": "float32", "trainer__lr": 5e-6}, 1, 98),
    ({"weights__anchor_every": 1}, 1, 0),
    ({"run__steps": 7}, 1, 7),
])  # fmt: skip
def test_deltas_count(write: Write, settings: dict[str, Any], share: float, deltas: int) -> None:
    """Between the newest anchors, and from an anchor to each other version that is kept."""
    report = fine(write(**{"run__steps": 10**6, "trainer__keep_checkpoints": 2, **settings}))
    disk = report.disk
    assert disk is not None and disk.deltas == deltas
    assert disk.delta_bytes == pytest.approx(disk.snapshot_bytes * share, rel=0.01)
    versions = disk.snapshot_bytes * disk.snapshots + disk.delta_bytes * disk.deltas
    assert disk.weights_bytes == versions + disk.checkpoint_bytes * disk.checkpoints
    assert (f"{deltas} of some {size(disk.delta_bytes)}, by" in report.to_text()) is bool(deltas)


def test_what_does_not_fit_is_said(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rftstream.preflight.estimate.free_bytes", lambda folder: 1_000)
    report = fine(write())
    assert report.disk is not None
    assert not report.disk.fits
    assert any(warning.startswith("disk: the run may need") for warning in report.warnings)


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x05\0\0\0\0\0\0\0nope!")
    with pytest.raises(ConfigError, match="not a safetensors file"):
        ModelSizes.of(tmp_path, None)


def test_operators_see_all_problems(write: Write, tmp_path: Path) -> None:
    """What the feeder would refuse is said by `check`."""
    config = write(pipeline=[{"op": "curriculum", "stages": [[1], [2]]}])
    write_rows(tmp_path, {"answer": "2", "level": 1}, {"answer": "3", "level": 2})
    assert fine(config).ok
    write_rows(tmp_path, {"answer": "2", "level": 1}, {"answer": "3", "level": 1})
    assert "pipeline.0.stages.1: the taskset train has no problem with level = (2,)" in errors(config)
    again = {"source": "jsonl:train.jsonl"}
    warned = [fine(write(evaluations={"held-out": again}, pipeline=one)).warnings for one in ([], [{"op": "dedupe"}])]
    assert ["is not held out" in " ".join(one) for one in warned] == [True, False]
    write_rows(tmp_path, {"answer": "2", "grade": 1})
    assert "has level = None, expected a value of `stages`; it has the columns grade" in errors(config)
