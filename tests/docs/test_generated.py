"""What follows from the code is up to date."""

from __future__ import annotations

import re

import generate
import pytest
from pages import operations
from pictures import flow, weights

from rftstream.errors import ENDS_THE_RUN
from tests.docs.reading import ROOT, read


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_generated_parts_are_up_to_date(page: str) -> None:
    text = read(ROOT / "docs" / page)
    assert generate.filled(text) == text, "run python docs/generate.py"


def test_every_generated_part_stands_in_a_page() -> None:
    text = "".join(read(page) for page in (ROOT / "docs").glob("*.md"))
    assert set(generate.BLOCKS) == set(re.findall(r"<!-- generated: (.+?) -->", text))


def test_the_picture_is_up_to_date_and_its_modules_exist() -> None:
    assert (ROOT / "docs" / "pictures" / "flow.svg").read_text(encoding="utf-8") == flow.draw()
    for role in flow.ROLES:
        for folder, names in role.modules:
            for name in names.split(", "):
                path = ROOT / "rftstream" / folder / name if not name.endswith("/") else ROOT / "rftstream" / name
                assert path.is_dir() or path.with_suffix(".py").is_file(), f"{role.name}: {path}"


def test_the_picture_of_deltas_is_up_to_date_and_says_what_the_page_says() -> None:
    assert (ROOT / "docs" / "pictures" / "weights.svg").read_text(encoding="utf-8") == weights.draw()
    page = read(ROOT / "docs" / "weights-format.md")
    for lr, values in weights.MEASURED.items():
        assert f"| {lr} | {' | '.join(map(str, values))} |" in page


def test_what_ends_a_run_is_told() -> None:
    told = {code for code, (_, does) in operations.MEANINGS.items() if does == "ends the run"}
    assert told == set(ENDS_THE_RUN)
