"""The commands of docs/data-pipelines-offline.md run, in order, over the files of the page."""

from __future__ import annotations

import json

import pytest

from tests.docs.following import Reader
from tests.docs.reading import ROOT, blocks
from tests.e2e.workplace import Workplace

PAGE = ROOT / "docs" / "data-pipelines-offline.md"


@pytest.mark.sampled(2, "pages")
@pytest.mark.process
@pytest.mark.slow
def test_the_commands_of_the_page_run(place: Workplace) -> None:
    reader = Reader(place)
    reader.write_files(blocks(PAGE, "toml"))
    reader.run_all(blocks(PAGE, "console"))
    told = dict(reader.told)
    own = told["rftstream pipeline preview --run runs/try"]
    assert "12 of 12 recorded groups" in own
    assert "to 12 the same is done as in the run" in own
    other = json.loads(told["rftstream pipeline preview stricter.toml --run runs/try --json"])
    assert [one["operator"] for one in other["groups"]["sums"]["operators"]] == ["zero_variance", "repetition"]
    both = told["rftstream replay runs/try --pipeline stricter.toml --into runs/stricter"]
    assert "zero_variance reject" in both or "groups filtered          0      0" in both
    prepared = json.loads(told["rftstream data prepare try.toml --out clean-parquet --parquet --json"])
    assert (place.folder / "clean-parquet" / "sums.parquet").is_file()
    assert prepared["tasksets"]["sums"]["out"] < prepared["tasksets"]["sums"]["in"] == 100
