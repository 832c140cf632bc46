"""The docs as a site: every page is in its navigation, and every link and anchor of the built pages leads somewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import build_site
import pytest

from tests.docs.reading import PAGES, ROOT, shown

LOADED = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src")}


class Page(HTMLParser):
    """What a page links and loads, and the anchors that it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if not value:
                continue
            if name in ("id", "name"):
                self.anchors.add(value)
            if (tag, name) == ("a", "href"):
                self.links.append(value)
            if (tag, name) in LOADED:
                self.loaded.append(value)


@pytest.fixture(scope="module")
def site(made: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    return made("site", lambda folder: build_site.build(folder / "workplace", folder / "site")) / "site"


def test_every_page_is_in_the_navigation() -> None:
    """Decisions are, by the page that lists them."""
    navigation = build_site.navigation()
    wanted = {shown(page) for page in PAGES if page.parent.name != "decisions"} | {"docs/decisions/README.md"}
    assert wanted <= set(navigation), "add it to mkdocs.yml"
    assert len(navigation) == len(set(navigation))
    assert all((ROOT / page).is_file() for page in navigation)
    assert set(PAGES) <= set(build_site.pages())


def test_links_to_folders_become_text_outside_of_code() -> None:
    text = "See [the tests](../tests/flow) and [a file](../LICENSE).\n\n```\n[code](../tests/flow)\n```\n"
    staged = build_site.as_staged(text, ROOT / "docs" / "data.md")
    assert staged == text.replace("[the tests](../tests/flow)", "the tests")


@pytest.mark.slow
def test_links_and_anchors_lead_somewhere(site: Path) -> None:
    found = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(found) >= len(PAGES)
    wrong = []
    for path, page in found.items():
        for link in (*page.links, *page.loaded):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                wrong.append(f"{path.relative_to(site)}: {link}: no such file")
            elif parts.fragment and target in found and unquote(parts.fragment) not in found[target].anchors:
                wrong.append(f"{path.relative_to(site)}: {link}: no such anchor")
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.slow
def test_a_reader_asks_no_other_host_and_can_search(site: Path) -> None:
    for path in site.rglob("*.html"):
        assert not [one for one in Page(path).loaded if urlsplit(one).netloc], path
    items = json.loads((site / "search.json").read_text(encoding="utf-8"))["items"]
    first_steps = ("docs/ten-settings/", "docs/coming-from", "docs/first-run/", "docs/cli/")
    for word in ("max_staleness", "num_generations", "OOM", "GPU", "resume"):
        found = [
            item["location"] for item in items if re.search(rf"\b{word}\b", f"{item['title']} {item['text']}", re.I)
        ]
        assert any(location.startswith(first_steps) for location in found), (word, found)
    assert (site / "examples" / "arithmetic.toml").is_file(), "what a page links is there"
