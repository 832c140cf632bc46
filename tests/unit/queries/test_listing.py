"""`list`: every part has a line, read without importing it; run folders with their state."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rftstream.config.parts import registry
from rftstream.errors import ConfigError
from rftstream.queries.reference import listing
from rftstream.queries.reference.settings import NAMING


@pytest.mark.parametrize("kind", registry.KINDS)
def test_every_part_has_a_line(kind: str) -> None:
    parts = listing.list_parts(kind)
    assert [part.name for part in parts] == list(registry.table(kind))
    assert all(part.description for part in parts)
    text = listing.parts_to_text(kind, parts)
    assert "To add one" in text
    assert f"{NAMING[kind]} = " in text


def test_settings_with_their_defaults() -> None:
    (grpo,) = (part for part in listing.list_parts("algorithm") if part.name == "grpo")
    assert "clip_low = 0.2" in grpo.knobs
    (gym,) = (part for part in listing.list_parts("taskset") if part.name == "reasoning_gym")
    assert "config = {}" in gym.knobs
    (hf,) = (part for part in listing.list_parts("taskset") if part.name == "hf")
    assert {"split = None", "answer_after = None"} <= set(hf.knobs), "its own and what it inherits"


def test_settings_are_inherited_over_several_classes_and_given_anew() -> None:
    parts = {part.name: part for part in listing.list_parts("algorithm")}
    assert {"kl_coef = 0.0", "correction = 'tis'", "clip_high = 0.28", "overlong_share = 0.2"} <= set(
        parts["dapo"].knobs
    )
    assert "clip_high = 0.2" not in parts["dapo"].knobs
    assert len({knob.partition(" ")[0] for knob in parts["dapo"].knobs}) == len(parts["dapo"].knobs)
    assert {"mu = 0.1", "clip_high = 0.2", "kl_coef = 0.0"} <= set(parts["mix"].knobs), "of a class inside another"


def test_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rftstream.backends.torch.backend", raising=False)
    listing.list_parts("backend")
    assert "rftstream.backends.torch.backend" not in sys.modules


def test_kinds_in_both_numbers() -> None:
    assert listing.kind_of("policies") == listing.kind_of("policy") == "policy"
    with pytest.raises(ConfigError, match="did you mean 'rewards'"):
        listing.kind_of("rewardz")


def test_a_folder_that_is_no_run_is_not_listed(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    assert listing.list_runs(tmp_path) == []
    assert "rftstream run" in listing.runs_to_text([])
    with pytest.raises(ConfigError, match="no such folder"):
        listing.list_runs(tmp_path / "nowhere")


def test_a_damaged_run_does_not_hide_the_others(tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.toml").write_text("[run")
    (line,) = listing.list_runs(tmp_path)
    assert line.state == "unknown"
    assert "not TOML" in listing.runs_to_text([line])


def test_runs_are_sought_where_run_writes_them(tmp_path: Path) -> None:
    run_file = '[run]\nname = "{name}"\nfolder = "{folder}"\n'
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "a.toml").write_text(run_file.format(name="a", folder="runs"))
    (tmp_path / "b.toml").write_text(run_file.format(name="b", folder="out/of/here"))
    (tmp_path / "broken.toml").write_text("[run")
    with pytest.raises(ConfigError, match=r"no runs here: neither runs/ nor .* --folder"):
        listing.run_places(tmp_path)
    for place, name in (("examples/runs", "a"), ("out/of/here", "b"), ("runs", "c")):
        (tmp_path / place / name).mkdir(parents=True)
        (tmp_path / place / name / "config.toml").write_text("[run")
    assert sorted(line.name for line in listing.list_runs(*listing.run_places(tmp_path))) == ["a", "b", "c"]
    assert str(tmp_path / "out/of/here") in listing.runs_to_text(listing.list_runs(*listing.run_places(tmp_path)))
    assert [line.name for line in listing.list_runs(*listing.run_places(tmp_path / "runs"))] == ["c"]
