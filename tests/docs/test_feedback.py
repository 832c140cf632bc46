"""The commands of docs/feedback.md run, in order, over the files of the page."""

from __future__ import annotations

import json

import pytest

from tests.docs.following import Reader
from tests.docs.reading import ROOT, blocks
from tests.e2e.workplace import Workplace

PAGE = ROOT / "docs" / "feedback.md"


@pytest.mark.process
@pytest.mark.slow
def test_the_commands_of_the_page_run(place: Workplace) -> None:
    reader = Reader(place)
    reader.write_files(blocks(PAGE, "toml", "jsonl"))
    reader.run_all(blocks(PAGE, "console"))
    written = place.view("runs/people").records("feedback")
    verdicts = [one.verdict for one in place.view("runs/judged").verified() if one.verdict is not None]
    outputs = dict(reader.told)
    first, second = (text for command, text in reader.told if command.startswith("rftstream feedback add"))
    assert first.startswith("5 votes of 2 annotators: 2 label, 2 pair, 1 correction added")
    assert second.startswith("5 votes of 2 annotators: nothing added; 5 there already")
    assert "share" in outputs["rftstream feedback questions runs/people"]
    judged = outputs["rftstream feedback judgements runs/people"]
    assert "label/sums/0/87/0/1" in judged
    assert "2 (v3)" in judged
    assert "applied correction" in outputs["rftstream trace runs/people sums/0/87/0/1"].replace("applied: ", "applied ")
    assert "5 votes: 5 pending" in outputs["rftstream audit runs/people"]
    judges = outputs["rftstream feedback annotators runs/people"].splitlines()
    assert [line.split()[1:3] for line in judges if line.startswith("all together")] == [
        ["together", "pair"],
        ["together", "label"],
    ]
    added = outputs["rftstream feedback gold runs/people --from right.jsonl"]
    assert added == "2 right answers: 1 label, 1 pair added\n"
    assert not any(b"bob" in (record.value or b"") for record in written), "who judges has another name on the log"
    human = [(one.reward, one.parts["human"]) for one in verdicts if "human" in one.parts]
    assert human == [(0.5, 0.5)] and len(verdicts) > 1, "the rest keeps its verdict"
    (pair,) = [json.loads(line) for line in (place.folder / "pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {"chosen", "rejected"} <= pair.keys()
    chat = json.loads((place.folder / "chats.jsonl").read_text(encoding="utf-8"))
    assert chat["messages"][-1]["content"] == "4"
    assert "v3" in outputs["rftstream feedback taints runs/people"]
    replayed = outputs["rftstream replay runs/people --without feedback --into runs/mended"]
    assert "batch 2, version 3: without 1 rollout, 0 whole groups" in replayed
