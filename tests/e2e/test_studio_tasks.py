"""The ten tasks of docs/studio.md, each in at most three clicks from the overview, in a real browser on real text; and
axe on every page of that run, with what opens on it open."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator

from rftstream.runs.folder import open_run
from tests.e2e.browser import Tab, chromium
from tests.e2e.test_studio import StudioProcess, check_pages, wait_until_read
from tests.e2e.workplace import Workplace
from tests.full_run import make_full_run
from tests.text_run import Said, read_said

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MOST_CLICKS = 3
PAGES = (
    "", "?as_of=v3", "/rollouts?text=calculator&order=worst", "/rollouts?status=truncated&tool=any",
    "/rollouts?text=nowhere",
    "/groups?fate=filtered", "/groups/letters-to-people/0/3/0", "/rollouts/letters-to-people/0/3/0/0?color=advantage",
    "/rollouts/word-problems/0/3/0/0", "/problems?order=forgotten", "/problems?doubtful=1", "/problems/word-problems/3",
    "/versions?order=-reward", "/versions/2", "/evaluations", "/evaluations/letters-held-out?order=lost", "/charts",
    "/charts?over=time", "/timeline", "/flow", "/dead", "/notes", "/questions", "/questions?state=judged",
    "/annotators",
    "/requests", "/versions/999999",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


class Clicks:
    """A visit that begins at the overview, and counts the clicks. Choosing an option of a list is one, too."""

    def __init__(self, tab: Tab, overview: str) -> None:
        self.page, self.num = tab.open(overview), 0

    def follow(self, link: Locator) -> None:
        """Click a link, and wait for its page."""
        self.num += 1
        with self.page.expect_navigation():
            link.click()

    def main(self, name: str) -> None:
        """Open a page of the main navigation."""
        self.follow(self.page.get_by_role("navigation", name="Pages of the run").get_by_role("link", name=name))

    def choose(self, name: str, option: str) -> None:
        self.num += 1
        with self.page.expect_navigation():
            self.page.locator(f"select[name={name}]").select_option(option)

    def rows(self) -> list[str]:
        return self.page.locator("tbody tr").all_inner_texts()

    def ids(self) -> list[str]:
        """Return the ids of the listed rollouts."""
        found = self.page.locator("tbody a.line").evaluate_all("links => links.map(link => link.pathname)")
        return [path.partition("/rollouts/")[2] for path in found]


def the_worst_of_a_problem(clicks: Clicks, said: list[Said]) -> None:
    clicks.main("Problems")
    row = clicks.page.locator("tbody tr").first
    problem = row.locator(".id").inner_text()
    clicks.follow(row.locator("a.line").last)
    name = clicks.page.locator("h1 code").inner_text()
    rewards = {one.name: one.reward for one in said if one.of == problem and one.reward is not None}
    assert rewards[name] == min(rewards.values())


def why_a_group_was_dropped(clicks: Clicks, said: list[Said]) -> None:
    clicks.follow(clicks.page.locator("[data-number='groups.filtered'] a"))
    clicks.follow(clicks.page.locator("tbody a.asked").first)
    facts = clicks.page.locator(".facts").first.inner_text()
    assert "zero_variance" in facts and "filtered" in clicks.page.locator("h1").inner_text()
    del said


def two_checkpoints(clicks: Clicks, said: list[Said]) -> None:
    clicks.main("Evaluations")
    clicks.follow(clicks.page.get_by_role("link", name="compare versions").first)
    clicks.follow(clicks.page.get_by_role("link", name="change"))
    texts = clicks.page.locator("tbody td:nth-of-type(4)").all_inner_texts()
    changes = [float(text) for text in texts if text != "–"]
    assert len(changes) > 5 and changes == sorted(changes, reverse=True)
    first = clicks.page.locator("tbody details").first
    first.locator("summary").press("Enter")
    assert first.locator(".beside pre").count() == 2
    del said


def answers_with_a_text(clicks: Clicks, said: list[Said]) -> None:
    clicks.main("Rollouts")
    clicks.num += 1
    clicks.page.get_by_role("searchbox").fill("start again")
    with clicks.page.expect_navigation():
        clicks.page.get_by_role("searchbox").press("Enter")
    expected = [one.name for one in said if "start again" in one.text][::-1]
    assert clicks.ids() == expected[:25]
    assert clicks.page.locator("mark").first.inner_text() == "start again"


def truncated_ones(clicks: Clicks, said: list[Said]) -> None:
    clicks.main("Rollouts")
    clicks.choose("status", "truncated")
    assert clicks.ids() == [one.name for one in said if one.status == "truncated"][::-1][:25]


def ones_with_a_tool(clicks: Clicks, said: list[Said]) -> None:
    clicks.main("Rollouts")
    clicks.choose("tool", "calculator")
    assert clicks.ids() == [one.name for one in said if "calculator" in one.tools][::-1][:25]


def what_was_unlearned(clicks: Clicks, said: list[Said]) -> None:
    clicks.main("Problems")
    for _ in range(2):
        clicks.follow(clicks.page.get_by_role("link", name="change"))
    texts = clicks.page.locator("tbody td:nth-of-type(6)").all_inner_texts()
    changes = [float(text) for text in texts if text != "–"]
    assert len(changes) > 5 and changes == sorted(changes)
    del said


def early_and_late(clicks: Clicks, said: list[Said]) -> None:
    clicks.main("Problems")
    row = clicks.page.locator("tbody tr").first
    problem = row.locator(".id").inner_text()
    clicks.follow(row.locator("a.asked"))
    versions = sorted({one.version for one in said if one.of == problem})
    for side, version in zip(clicks.page.locator(".beside > div").all(), (versions[0], versions[-1]), strict=True):
        assert side.locator("h3").inner_text().startswith(f"v{version} ")
        shown = set(side.locator(".facts a").all_inner_texts())
        assert shown <= {one.name for one in said if one.of == problem and one.version == version} and shown


def what_a_checkpoint_was_trained_on(clicks: Clicks, said: list[Said]) -> None:
    clicks.main("Checkpoints")
    clicks.follow(clicks.page.locator("tbody a.asked").first)
    version = int(re.sub(r"\D", "", clicks.page.locator("h1").inner_text()))
    clicks.follow(clicks.page.get_by_role("link", name="its rollouts"))
    batch = [one for one in said if one.batch == version - 1]
    found = clicks.ids()
    assert set(found) <= {one.name for one in batch} and len(found) == 25
    rewards = {one.name: one.reward or 0.0 for one in batch}
    assert [rewards[name] for name in found] == sorted(rewards.values(), reverse=True)[:25]


def the_longest(clicks: Clicks, said: list[Said]) -> None:
    clicks.main("Rollouts")
    clicks.follow(clicks.page.get_by_role("link", name="tokens"))
    tokens = {one.name: one.tokens for one in said}
    assert [tokens[name] for name in clicks.ids()] == sorted(tokens.values(), reverse=True)[:25]


TASKS: tuple[Callable[[Clicks, list[Said]], None], ...] = (
    the_worst_of_a_problem, why_a_group_was_dropped, two_checkpoints, answers_with_a_text, truncated_ones,
    ones_with_a_tool, what_was_unlearned, early_and_late, what_a_checkpoint_was_trained_on, the_longest,
)  # fmt: skip


@pytest.mark.sampled(3, "browser")
@pytest.mark.heavy("a browser does ten tasks, and opens every page in two colours and two widths")
@pytest.mark.parametrize("num_rollouts", [1_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_ten_tasks(
    place: Workplace,
    browser: Browser,
    made: Callable[[str, Callable[[Path], None]], Path],
    num_rollouts: int,
) -> None:
    folder = made(f"words-{num_rollouts}", partial(_make, num_rollouts=num_rollouts))
    run = shutil.copytree(folder / "words", place.folder / "words")
    opened = open_run(run)
    said = read_said(opened)
    opened.transport.close()
    assert len(said) >= num_rollouts
    studio = StudioProcess(place, run, more=("--local-role", "operator"))
    wait_until_read(place, studio, run)
    tab = Tab(browser)

    def texts_are_read() -> bool:
        page = tab.open(f"{studio.url}/runs/words/evaluations").content()
        return (
            "compare versions" in page and "being read" not in tab.open(f"{studio.url}/runs/words/rollouts").content()
        )

    place.wait_for(texts_are_read, "the texts to be read")
    for task in TASKS:
        clicks = Clicks(tab, f"{studio.url}/runs/words")
        task(clicks, said)
        assert clicks.num <= MOST_CLICKS, f"{task.__name__} takes {clicks.num} clicks"
    assert not tab.complaints
    tab.close()
    check_pages(browser, studio, [f"/runs/words{page}" for page in PAGES if "999" not in page])
    filters_by_keys(browser, f"{studio.url}/runs/words/rollouts")
    with_all_open(browser, studio, [f"/runs/words{page}" for page in PAGES])
    studio.stop()


def with_all_open(browser: Browser, studio: StudioProcess, addresses: list[str]) -> None:
    """Each page with its folded parts open, on a telephone: nothing is cut off, and axe finds nothing."""
    tab = Tab(browser, width=360)
    for address in addresses:
        tab.open(studio.url + address).evaluate(
            "for (const one of document.querySelectorAll('details')) one.open = true"
        )
        assert tab.overflow() <= 0, f"{address} is too wide with all open"
        assert tab.barriers() == [], f"{address} with all open"
    tab.close()


def filters_by_keys(browser: Browser, address: str) -> None:
    """Options that are passed on the way to another are not chosen, and a range is filled field by field."""
    tab = Tab(browser)
    page = tab.open(address)
    page.locator("select[name=status]").focus()
    for _ in range(2):
        page.keyboard.press("ArrowDown")
    page.locator("input[name=reward_from]").fill("0.2")
    page.keyboard.press("Tab")
    page.keyboard.type("0.9")
    assert page.url == address and page.locator("select[name=status]").input_value() == "truncated"
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("status=truncated.*reward_from=0.2&reward_to=0.9"))
    tab.close()


def _make(folder: Path, *, num_rollouts: int) -> None:
    make_full_run(folder / "words", num_rollouts)
