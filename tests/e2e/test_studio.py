"""The studio as people use it: its command, a real browser, a finished run and one that goes on."""

from __future__ import annotations

import re
import shutil
import signal
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import SystemRandom

import pytest
from playwright.sync_api import Browser, Route

from tests.e2e.browser import Tab, chromium
from tests.e2e.workplace import FAKE, Process, Workplace, sets

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PEOPLE = (
    "policies.fake.fail_share=0.1", "run.steps=8", "feeder.group_size=4", "feedback.share=0.3", "feedback.pairs=0.5",
    "feedback.quorum=1",
)  # fmt: skip
ENDLESS = ("run.steps=100000", "backends.fake.step_s=0.6")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


def run_people(folder: Path) -> None:
    """A run with all that pages show: groups of every fate, and questions to people."""
    place = Workplace(folder)
    try:
        place.write("tiny.toml", FAKE)
        done = place.call("run", "tiny.toml", "--run-dir", "people", *sets(*PEOPLE))
        assert done.code == 0, done.err
    finally:
        place.end()


@pytest.fixture
def people(place: Workplace, made: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """A copy of that run."""
    return shutil.copytree(made("run-of-people", run_people) / "people", place.folder / "people")


class StudioProcess:
    """`rftstream studio` over some runs."""

    def __init__(self, place: Workplace, *runs: Path, more: tuple[str, ...] = ()) -> None:
        self.process: Process = place.start("studio", *runs, "--port", "0", *more)
        place.wait_for(lambda: "ctrl-C ends it" in self.process.out, "the studio to listen")
        found = re.search(r"http://\S+?/", self.process.out)
        assert found is not None
        self.url = found[0].rstrip("/")

    def stop(self) -> None:
        self.process.send(signal.SIGINT)
        done = self.process.finish()
        assert done.code in (0, 130, -signal.SIGINT), done.err


def pages_of(place: Workplace, run: Path) -> list[str]:
    """An address for each kind of page, with ids that the run has."""
    outcome = next(one for one in place.view(run).outcomes() if one.batch_sequence is not None)
    group, name = outcome.group_id, run.name
    _, _, problem, _ = group.split("/")
    parts = (
        "", "/charts", "/charts?over=time", "/groups", "/rollouts", "/groups?fate=dead", f"/groups/{group}",
        f"/rollouts/{group}/0",
        f"/rollouts/{group}/0?color=advantage", "/problems?order=learned", f"/problems/sums/{problem}", "/versions",
        "/versions/1", "/evaluations", "/questions", "/dead", "/requests", "/flow", "/timeline", "/notes", "?as_of=v1",
        "/groups?as_of=v1",
    )  # fmt: skip
    return [f"/runs/{name}{part}" for part in parts]


@pytest.mark.sampled(3, "browser")
@pytest.mark.heavy("a browser opens every page, in two colours and two widths")
def test_every_page_of_a_finished_run(place: Workplace, browser: Browser, people: Path) -> None:
    studio = StudioProcess(place, people)
    wait_until_read(place, studio, people)
    audited, status = place.look("audit", people, "--json").result, place.look("status", people, "--json").result
    check_pages(browser, studio, pages_of(place, people))
    tab = Tab(browser)
    shown = numbers(tab.open(f"{studio.url}/runs/people").content())
    for name in ("groups", "rollouts"):
        for fate in ("admitted", "trained", "pending", "filtered", "expired", "dead"):
            assert shown[f"{name}.{fate}"] == audited[name][fate]
    assert shown["version"] == status["version"] == audited["version"]
    keys_alone(tab)
    tab.close()
    small_numbers_on_axes(browser, f"{studio.url}/runs/people/charts")
    charts_by_hand(browser, f"{studio.url}/runs/people/charts")
    without_scripts(browser, f"{studio.url}/runs/people")
    studio.stop()


@pytest.mark.sampled(3, "browser")
@pytest.mark.heavy("a browser opens the page that `plot` writes")
def test_the_page_of_plot_stands_by_itself(place: Workplace, browser: Browser, people: Path) -> None:
    done = place.look("plot", people, "--json")
    assert done.code == 0, done.err
    tab = Tab(browser)
    page = tab.open(Path(done.result["page"]).as_uri())
    figures = page.locator("figure.chart:has(.legend)")
    page.evaluate("for (const theme of document.querySelectorAll('details.theme')) theme.open = true")
    page.wait_for_function(f"document.querySelectorAll('figure.chart .drawn canvas').length === {figures.count()}")
    assert figures.count() >= 10
    assert tab.barriers() == [] and tab.overflow() <= 0
    entry = figures.first.locator(".legend button").first
    entry.click()
    assert entry.get_attribute("aria-pressed") == "false"
    tab.darken()
    assert tab.barriers("color-contrast") == []
    tab.resize(360)
    assert tab.overflow() <= 0
    report = place.folder / "people.html"
    done = place.call("studio", people, "--report", report)
    assert done.code == 0 and f"{report}: " in done.out, done.err
    tab.open(report.as_uri())
    assert tab.barriers() == [] and tab.overflow() <= 0
    assert tab.complaints == [] and tab.hosts <= {""}, "nothing is fetched"
    tab.close()


def check_pages(browser: Browser, studio: StudioProcess, addresses: list[str], *, narrow: bool = False) -> None:
    """Each page as a telephone and as a computer show it, by day and by night. `narrow`: axe looks at both."""
    tab = Tab(browser)
    for address in addresses:
        tab.resize(360)
        page = tab.open(studio.url + address)
        assert page.locator("h1").count() == 1, address
        assert tab.overflow() <= 0, f"{address} is too wide for 360 px"
        assert not narrow or tab.barriers() == [], f"{address} on a telephone"
        tab.resize(1280)
        assert tab.overflow() <= 0, f"{address} is too wide for 1280 px"
        assert tab.barriers() == [], address
        tab.darken()
        assert tab.barriers("color-contrast") == [], f"{address} in the dark"
    assert not tab.complaints
    assert tab.hosts == {studio.url.removeprefix("http://")}, "nothing is asked of anybody else"
    tab.close()


def wait_until_read(place: Workplace, studio: StudioProcess, run: Path) -> None:
    """The catalog is made in the background; until it is there, pages say so."""

    def is_read() -> bool:
        page = urllib.request.urlopen(f"{studio.url}/runs/{run.name}").read().decode()
        return 'data-number="version"' in page and "reading the log" not in page

    place.wait_for(is_read, "the studio to have read the log")


def numbers(page: str) -> dict[str, int]:
    found = re.findall(r'data-number="([a-z.]+)">(?:<a [^>]*>)?([\d,]+)', page)
    return {name: int(value.replace(",", "")) for name, value in found}


def keys_alone(tab: Tab) -> None:
    """From the overview to a token, and back to an earlier moment, without a pointer."""
    page = tab.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.locator("table.groups a").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("/groups/"))
    page.locator(".sibling a").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("/rollouts/"))
    page.locator("[data-tokens]").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("#token-numbers").inner_text().startswith("1: id ")
    page.go_back()
    page.locator("#as-of-range").focus()
    page.keyboard.press("Home")
    page.wait_for_url(re.compile("as_of=v1"))


def small_numbers_on_axes(browser: Browser, address: str) -> None:
    """Labels of an axis tell its values apart, and it says what they are."""
    tab = Tab(browser)
    tab.page.add_init_script(
        "window.written = []; const fill = CanvasRenderingContext2D.prototype.fillText;"
        "CanvasRenderingContext2D.prototype.fillText ="
        " function (text, ...place) { window.written.push(String(text)); return fill.call(this, text, ...place); };"
    )

    def of_small_numbers(route: Route) -> None:
        panel = route.fetch().json()[0]
        (line, *_) = panel["lines"]
        line |= {"y": [2e-5 * place for place, _ in enumerate(line["x"])], "mean": None, "right": False}
        changes = {"lines": [line], "unit": "nats", "rightUnit": "", "log": False, "range": None, "fromZero": True}
        route.fulfill(json=[panel | changes])

    tab.page.route("**/charts.json*", of_small_numbers)
    written = tab.open(address).evaluate("window.written")
    assert {"version (trained batches)", "nats"} <= set(written)
    small = [float(text) for text in set(written) if re.fullmatch(r"[\d.]+e-\d+", text)]
    assert len(small) > 2 and all(0 < value < 1e-3 for value in small)
    assert not tab.complaints
    tab.close()


def charts_by_hand(browser: Browser, address: str) -> None:
    """A chart is zoomed by pointer and by keys, and kept as a picture and a table; folded ones are drawn when opened,
    and the choice of panels is in the address."""
    tab = Tab(browser)
    page = tab.open(address)
    figure = page.locator("figure.chart").first
    back = figure.get_by_role("button", name="zoom back")
    place = figure.locator(".u-over").bounding_box()
    assert place is not None and back.is_hidden()
    page.mouse.move(place["x"] + 0.2 * place["width"], place["y"] + 50)
    page.mouse.down()
    page.mouse.move(place["x"] + 0.7 * place["width"], place["y"] + 60, steps=4)
    page.mouse.up()
    assert back.is_visible() and page.url == address, "a drag is no click on a version"
    back.click()
    assert back.is_hidden()
    figure.locator(".drawn").focus()
    for key, zoomed in (("ArrowLeft", False), ("+", True), ("Escape", False)):
        page.keyboard.press(key)
        assert back.is_visible() is zoomed, key
    for role, name, ending in (("button", "PNG", ".png"), ("link", "as CSV", ".csv")):
        with page.expect_download() as download:
            figure.get_by_role(role, name=name).click()  # type: ignore[arg-type]  # one of two roles
        assert download.value.suggested_filename.endswith(ending)
    for theme in page.locator("details.theme").all():
        theme.locator("summary").click()
        theme.locator(".u-over").first.wait_for()
    assert tab.barriers() == []
    page.locator(".pick summary").click()
    page.get_by_role("checkbox", name="Loss").check()
    page.evaluate("document.querySelector('#view h1').textContent = ''")
    while page.locator("#view h1").inner_text() != "Charts":  # until news of the run have come into the page
        page.evaluate("document.querySelector('#live').dispatchEvent(new Event('changed'))")
        page.wait_for_timeout(200)
    assert page.get_by_role("checkbox", name="Loss").is_checked(), "what was opened and chosen stays"
    page.get_by_role("button", name="Show these").click()
    page.wait_for_url(re.compile("show=Loss"))
    assert page.locator("h1").inner_text() == "Loss" and page.locator("figure.chart").count() == 1
    assert not tab.complaints
    tab.close()


def without_scripts(browser: Browser, address: str) -> None:
    tab = Tab(browser, scripts=False)
    tab.page.goto(address)
    assert tab.page.locator("h1").count() == 1
    assert tab.page.locator("figure.chart polyline").count() >= 2, "curves are pictures"
    tab.page.fill("#as-of-text", "v2")
    tab.page.click(".as-of button")
    assert tab.page.locator(".then").inner_text().endswith("version 2 in force")
    assert not tab.complaints
    tab.close()


@pytest.mark.sampled(3, "browser")
@pytest.mark.heavy("a browser follows a run of processes, which are killed then")
def test_a_page_follows_a_run_that_goes_on(place: Workplace, browser: Browser) -> None:
    run = place.folder / "live"
    running = place.start("run", "tiny.toml", "--run-dir", run, *sets(*ENDLESS))
    place.wait_for(lambda: run.is_dir() and (run / "log" / "log.sqlite").is_file(), "the run to begin")
    place.wait_for(lambda: len(place.view(run).steps()) >= 2, "two steps")
    studio = StudioProcess(place, run)
    wait_until_read(place, studio, run)
    tab = Tab(browser)
    refused: list[str] = []

    def refuse_once(route: Route) -> None:
        refused.append(route.request.url)
        route.fulfill(status=503) if len(refused) == 1 else route.continue_()

    tab.page.route("**/events*", refuse_once)
    page = tab.open(f"{studio.url}/runs/live")
    first = int(page.locator('[data-number="version"]').inner_text().replace(",", ""))
    page.evaluate("document.body.dataset.loaded = 'once'")
    place.wait_for(  # the run may be slow; and a browser that draws nothing does not poll by itself
        lambda: int(page.locator('[data-number="version"]').inner_text().replace(",", "")) > first + 2,
        f"version {first + 3} on the page",
    )
    assert page.evaluate("document.body.dataset.loaded") == "once", "the page was not loaded anew"
    assert len(refused) > 1, "a page that was refused at first asks again"
    assert all("503" in complaint for complaint in tab.complaints)
    tab.complaints.clear()
    assert page.locator("figure.chart .u-over").count() >= 2, "curves outlive the new numbers"
    assert tab.open(f"{studio.url}/runs/live/flow").locator(".worker.up").count() >= 5
    for address in SystemRandom().sample(pages_of(place, run), 5):  # all of them: of the run that has ended
        tab.open(studio.url + address)
        assert tab.page.locator("h1").count() == 1, address
        assert not tab.complaints, address
    tab.close()
    kill_and_go_on(place, studio, run)
    running.send(signal.SIGTERM)
    running.finish()
    place.view(run).assert_nothing_lost()


def kill_and_go_on(place: Workplace, studio: StudioProcess, run: Path) -> None:
    """A studio that is killed delays nobody, and its catalog is gone on with."""
    studio.process.send(signal.SIGKILL)
    studio.process.finish()
    before = len(place.view(run).steps())
    place.wait_for(lambda: len(place.view(run).steps()) > before, "the run to go on without the studio")
    again = StudioProcess(place, run)
    wait_until_read(place, again, run)
    page = urllib.request.urlopen(f"{again.url}/runs/live").read().decode()
    assert numbers(page)["version"] >= before
    again.stop()


@pytest.mark.sampled(3, "browser")
@pytest.mark.heavy("a browser goes through pages by its keyboard")
def test_people_judge_by_keyboard_alone(place: Workplace, browser: Browser, people: Path) -> None:
    run = people
    studio = StudioProcess(place, run, more=("--local-role", "operator", "--local-name", "ada"))
    wait_until_read(place, studio, run)
    asked = place.look("feedback", "questions", run, "--json").result
    pair, label = (next(one for one in asked if one["kind"] == kind) for kind in ("pair", "label"))
    rollout = label["rollouts"][0]
    names = [
        pair["question_id"],
        label["question_id"],
        *(f"{kind}/{rollout}" for kind in ("rating", "correction", "flag")),
    ]
    addresses = [f"/questions/{name.replace('+', '%2B')}" for name in names] + [
        "/questions",
        "/annotators",
        "/requests",
        "/dead",
    ]
    check_pages(browser, studio, [f"/runs/people{address}" for address in addresses], narrow=True)
    tab = Tab(browser)
    votes_by_letters(tab, f"{studio.url}/runs/people/questions")
    corrects(tab, f"{studio.url}/runs/people/questions/correction/{rollout}")
    assert not tab.complaints
    tab.close()
    narrow = Tab(browser, width=360)
    page = narrow.open(f"{studio.url}/runs/people/annotators")
    assert page.locator("tbody tr").count() == 1 and "median time" in page.content()
    assert narrow.overflow() <= 0 and narrow.barriers() == []
    narrow.close()
    plain = Tab(browser, scripts=False)
    votes_without_scripts(plain, f"{studio.url}/runs/people/questions/rating/{rollout}")
    plain.close()
    said = [one["vote"] for one in place.look("feedback", "list", run, "--json").result]
    kinds = Counter(one["kind"] for one in said)
    assert (kinds["correction"], kinds["rating"], kinds["retract"], kinds["label"] + kinds["pair"]) == (1, 1, 1, 3)
    assert all(one["source"] == "studio" and one["lead_time_s"] >= 0 for one in said if one["kind"] != "retract")
    assert all(one["order"] in ([0, 1], [1, 0]) for one in said if one["kind"] == "pair")
    studio.stop()


def votes_by_letters(tab: Tab, address: str) -> None:
    """From the queue through three questions, and the last answer back."""
    page = tab.open(address)
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.name") == "id", "the field that finds"
    page = tab.open(address)
    page.keyboard.press("n")
    for _ in range(3):
        page.wait_for_selector("form[data-keys]")
        name = page.locator("h1 code").inner_text()
        page.keyboard.press("a" if name.startswith("pair") else "1")
        page.wait_for_selector(f".said a[href*='{name.replace('+', '%2B')}']")
    page.keyboard.press("u")
    page.wait_for_function("name => document.querySelector('h1 code').textContent === name", arg=name)
    assert page.locator(".said").count() == 0, "it is taken back"


def corrects(tab: Tab, address: str) -> None:
    """Types over what was said, and sends it; the page shows what was changed."""
    page = tab.open(address)
    page.keyboard.press("Control+A")
    page.keyboard.type("n a 1 u <script>alert(1)</script>")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".said")
    page = tab.open(address)
    assert page.locator("#difference ins").all_inner_texts()[-1].endswith(">")


def votes_without_scripts(tab: Tab, address: str) -> None:
    """Tab and Enter are enough."""
    tab.page.goto(address)
    for _ in range(60):
        tab.page.keyboard.press("Tab")
        if tab.page.locator("button[value='4']:focus").count():
            break
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_selector(".said")
    assert "rating 4" in tab.page.locator(".said").inner_text()


def test_on_another_address_a_token_is_a_must(place: Workplace, browser: Browser, people: Path) -> None:
    run, tokens = people, str(place.folder / "tokens.json")
    refused = place.look("studio", run, "--host", "0.0.0.0", "--port", "0", "--tokens", tokens)
    assert refused.code == 2 and "a token is a must" in refused.err
    token = place.look("studio", "--new-token", "ada=viewer", "--tokens", tokens).out.strip()
    assert token.startswith("rfts-") and token not in Path(tokens).read_text()
    assert place.look("studio", "--new-token", "ada=king", "--tokens", tokens).code == 2
    studio = StudioProcess(place, run, more=("--host", "0.0.0.0", "--tokens", tokens))
    url = studio.url.replace("0.0.0.0", "127.0.0.1")
    tab = Tab(browser)
    page = tab.open(f"{url}/runs/people")
    assert page.url == f"{url}/login"
    assert tab.barriers() == []
    page.fill("#token", "rfts-guess")
    page.keyboard.press("Enter")
    page.wait_for_selector("[role=alert]")
    assert tab.complaints.pop().startswith(("401", "error: Failed to load"))
    page.fill("#token", token)
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("/runs/people"))
    asked = urllib.request.Request(f"{url}/runs/people/charts.json", headers={"authorization": f"Bearer {token}"})
    place.wait_for(
        lambda: urllib.request.urlopen(asked).headers["content-type"] == "application/json", "curves as data"
    )
    page.click(".who button")
    page.wait_for_url(f"{url}/login")
    tab.close()
    studio.stop()


def test_wrong_arguments(place: Workplace) -> None:
    none = place.look("studio", "nowhere")
    assert none.code == 2 and "no such file" in none.err
    assert place.look("studio").code == 2
