"""The run file and the commands of docs/data-pipelines-synthesis.md, with a scripted model as the server."""

from __future__ import annotations

import pytest

from rftstream.contracts.problems import NewProblem, ProblemKind
from tests.docs.following import Reader
from tests.docs.reading import ROOT, blocks
from tests.e2e.workplace import RunView, Workplace, sets
from tests.flow.writers import served, writer

PAGE = ROOT / "docs" / "data-pipelines-synthesis.md"
URL = "http://127.0.0.1:8000/v1"


@pytest.mark.sampled(2, "pages")
@pytest.mark.process
@pytest.mark.slow
def test_the_page_is_true(place: Workplace) -> None:
    with served(writer) as server:
        for block in blocks(PAGE, "toml", "json"):
            assert block.name
            place.write(block.name, block.text.replace(URL, server.url))
        run = place.start("run", "grow.toml", *sets("run.steps=100000"))
        view = place.view("runs/grow")
        place.wait_for(lambda: _joined(view), "a problem that the model made")
        assert place.call("drain", "runs/grow").code == 0
        assert run.finish().code == 0
    reader = Reader(place)
    reader.run_all(blocks(PAGE, "console"))
    told = dict(reader.told)
    made = _joined(view)
    assert "2 rows: 2 added to more" in told["rftstream problems add runs/grow --from mine.jsonl --by ada"]
    assert "ada" in told["rftstream problems list runs/grow"]
    assert made[0].kind in (ProblemKind.reworded, ProblemKind.varied)
    traced = told["rftstream trace runs/grow more/0"]
    assert made[0].parent is not None
    assert made[0].parent in traced


def _joined(view: RunView) -> list[NewProblem]:
    return [one for one in view.messages("problems") if isinstance(one, NewProblem)]
