"""The run file and the commands of docs/data-pipelines-synthesis.md, with a scripted model as the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from rftstream.contracts.problems import NewProblem, ProblemKind
from tests.docs.following import Reader
from tests.docs.reading import ROOT, blocks
from tests.e2e.workplace import Workplace
from tests.flow.writers import served, writer

PAGE = ROOT / "docs" / "data-pipelines-synthesis.md"
URL = "http://127.0.0.1:8000/v1"


@pytest.mark.sampled(2, "pages")
@pytest.mark.process
@pytest.mark.slow
def test_the_page_is_true(tmp_path: Path) -> None:
    place = Workplace(tmp_path)
    try:
        with served(writer) as server:
            for block in blocks(PAGE, "toml", "json"):
                assert block.name
                place.write(block.name, block.text.replace(URL, server.url))
            done = place.call("run", "grow.toml")
            assert done.code == 0, done.err
        reader = Reader(place)
        for block in blocks(PAGE, "console"):
            for command in block.commands:
                reader.run(command)
        told = dict(reader.told)
        made = [one for one in place.view("runs/grow").messages("problems") if isinstance(one, NewProblem)]
    finally:
        place.end()
    assert "2 rows: 2 added to more" in told["rftstream problems add runs/grow --from mine.jsonl --by ada"]
    assert "ada" in told["rftstream problems list runs/grow"]
    assert made[0].kind in (ProblemKind.reworded, ProblemKind.varied)
    traced = told["rftstream trace runs/grow more/0"]
    assert made[0].parent is not None
    assert made[0].parent in traced
