"""What a release says of a run that another one has begun: settings that it does not know, and ones that are new."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from rftstream.config import loader
from rftstream.errors import ConfigError
from rftstream.runs import folder
from rftstream.runs.folder import RunFolder, read_config
from rftstream.runs.making import create
from rftstream.runs.manifest import check_same_run, check_worker, make_manifest
from rftstream.version import __version__
from tests.configs import small_run

CONFIG = small_run(
    run={"name": "run", "steps": 3}, model={"make": {"layers": 1, "width": 16, "heads": 2}, "lora": {"rank": 4}},
    pipeline=[{"op": "length"}],
)  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.path.mkdir()
    create.write_config(CONFIG, made)
    return made


def test_a_config_says_who_wrote_it(run: RunFolder) -> None:
    assert run.config_file.read_text().startswith(f"# Written by rftstream {__version__}\n")
    assert read_config(run) == CONFIG


def test_settings_of_a_later_release_are_refused_by_its_name(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    run.config_file.write_text(run.config_file.read_text().replace("[run]\n", "[run]\nmade_up_later = 1\n"))
    with pytest.raises(ConfigError, match=r"run\.made_up_later: unknown key") as ours:
        read_config(run)
    assert "wrote the file" not in str(ours.value), "this release did"
    monkeypatch.setattr(folder, "__version__", "0.0.9")
    with pytest.raises(ConfigError, match="made_up_later") as caught:
        read_config(run)
    assert str(caught.value).endswith(f"(rftstream {__version__} wrote the file, this is 0.0.9)")


@pytest.mark.parametrize("setting", ["alpha", "zero_variance", "min_siblings"])
def test_a_setting_that_has_come_since_does_not_differ(setting: str) -> None:
    """As the release before wrote the manifest: without it. A part of what a run keeps may be what has come."""
    manifest = make_manifest(CONFIG, "run", {"taskset.sums": "any"}, 1.0)
    before, count = re.subn(rf"^{setting} = .*\n", "", manifest.config, flags=re.MULTILINE)
    assert count == 1
    older = dataclasses.replace(manifest, config=before)
    check_worker(older, CONFIG, {})
    check_same_run(older, CONFIG, {"taskset.sums": "any"})
    changed = dataclasses.replace(manifest, config=manifest.config.replace("rank = 4", "rank = 8"))
    with pytest.raises(ConfigError, match=r"model\.lora\.rank 8 -> 4"):
        check_worker(changed, CONFIG, {})


def test_a_release_before_may_go_on_after_a_later_one_has_resumed_the_run(run: RunFolder) -> None:
    """What has come since is written only where it is not at its default; what was there stays."""
    new = {"zero_variance": "buffer", "max_refill": "buffer", "alpha": "model.lora", "group_size": "feeder"}
    text = run.config_file.read_text()
    for setting in new:
        text, count = re.subn(rf"^{setting} = .*\n", "", text, flags=re.MULTILINE)
        assert count == 1
    run.config_file.write_text(text)
    changed = loader.replace(read_config(run), run__steps=9, buffer__max_refill=7)
    create.write_config(changed, run)
    written = run.config_file.read_text()
    assert read_config(run) == changed
    assert [setting for setting in new if re.search(rf"^{setting} = ", written, re.MULTILINE)] == ["max_refill"]
    removed = re.sub(r"^max_refill = .*\n", "", written, flags=re.MULTILINE)
    assert removed == text.replace("steps = 3", "steps = 9"), "all that was there is there"
