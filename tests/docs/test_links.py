"""Links lead somewhere."""

from __future__ import annotations

from pathlib import Path

from tests.docs.reading import PAGES, ROOT, anchors, links, shown
from tests.suite.each import each


@each("page", PAGES, ids=shown)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: no such file"
        assert ROOT in target.parents, f"{link}: leaves the repository"
        if anchor:
            assert anchor in anchors(target), f"{link}: no such heading"


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen: set[Path] = set()
    todo = [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen:
            continue
        seen.add(page)
        here = [link for link in links(page) if not link.startswith(("#", "http"))]
        targets = [(page.parent / link.partition("#")[0]).resolve() for link in here]
        todo += [target for target in targets if target.suffix == ".md" and target in PAGES]
    assert set(PAGES) == seen
