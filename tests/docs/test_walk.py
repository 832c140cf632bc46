"""The way of a config through the start of a run: what the page shows is there, and nothing leads back."""

from __future__ import annotations

from pictures import start as picture

from tests.docs.reading import ROOT, read
from tests.source import lies_in, sources


def test_the_picture_stands_in_the_page() -> None:
    page = read(ROOT / "docs" / "architecture.md")
    assert "pictures/start.svg" in page
    for process in picture.PROCESSES:
        for folder, name in process.modules:
            place = f"{'' if folder == 'workers/' else 'rftstream/'}{folder}{name}.py"
            assert (ROOT / place).is_file(), place
            assert f"(../{place})" in page or folder in ("workers/", "service/", "service/loops/"), (
                f"{place} is not in the table"
            )


def test_imports_go_the_same_way() -> None:
    """What is entered later knows nothing of what was entered before."""
    order = [f"rftstream.launch.{name}" for one in picture.PROCESSES for folder, name in one.modules
             if folder == "launch/"]  # fmt: skip
    assert len(order) == 5
    wrong = [
        str(one)
        for source in sources("rftstream/launch")
        if source.module in order
        for one in source.imports
        for earlier in order[: order.index(source.module)]
        if lies_in(one.name, earlier)
    ]
    assert not wrong, "\n".join(wrong)
