"""What is generated is used, and what it is made from exists. That it is up to date, test_extending.py holds."""

from __future__ import annotations

import re

import generate
from pages import operations
from pictures import flow, weights

from rftstream.errors import ENDS_THE_RUN, TakenOver, TransportError
from tests.docs.reading import ROOT, read


def test_every_generated_part_stands_in_a_page() -> None:
    text = "".join(read(page) for page in (ROOT / "docs").glob("*.md"))
    assert set(generate.BLOCKS) == set(re.findall(r"<!-- generated: (.+?) -->", text))


def test_every_picture_that_is_drawn_is_written() -> None:
    drawn = {path.stem for path in (ROOT / "docs" / "pictures").glob("*.py")}
    assert drawn == set(generate.PICTURES) == {path.stem for path in (ROOT / "docs" / "pictures").glob("*.svg")}


def test_the_modules_of_the_picture_of_the_flow_exist() -> None:
    for role in flow.ROLES:
        for folder, names in role.modules:
            for name in names.split(", "):
                path = ROOT / "rftstream" / folder / name if not name.endswith("/") else ROOT / "rftstream" / name
                assert path.is_dir() or path.with_suffix(".py").is_file(), f"{role.name}: {path}"


def test_the_picture_of_deltas_says_what_the_page_says() -> None:
    page = read(ROOT / "docs" / "weights-format.md")
    for lr, values in weights.MEASURED.items():
        assert f"| {lr} | {' | '.join(map(str, values))} |" in page


def test_what_ends_a_run_is_told() -> None:
    told = {code for code, (_, does) in operations.MEANINGS.items() if does == "ends the run"}
    assert told == set(ENDS_THE_RUN)
    # A log that cannot be reached (3) may come back: SLURM's script and systemd try again.
    for_good = sorted(ENDS_THE_RUN - {TransportError.exit_code})
    assert f"\n      {' | '.join(map(str, for_good))})\n" in read(ROOT / "rftstream/integrations/slurm_job.sh")
    prevented = re.search(r"RestartPreventExitStatus=([\d ]+)", read(ROOT / "rftstream/integrations/systemd.py"))
    assert prevented is not None
    assert {int(code) for code in prevented[1].split()} == {*for_good, TakenOver.exit_code}
