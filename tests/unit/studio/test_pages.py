"""Every page on a simulated run, now and in the past; what rollouts say stays text, and pages stay small."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.testclient import TestClient

from rftstream.contracts.arrays import Array
from rftstream.contracts.batches import BatchManifest, Experience, LossKind
from rftstream.contracts.dead import DeadLetter
from rftstream.contracts.outcomes import GroupOutcome, GroupResult, RolloutSummary
from rftstream.contracts.rollouts import Rollout, RolloutStatus, Segment, Turn, VersionSpan
from rftstream.contracts.tasks import ChatMessage, Problem, Sampling, Task
from rftstream.contracts.verdicts import Verdict, VerifiedRollout
from rftstream.contracts.versions import EvalResult, VersionName
from rftstream.core.advantages import compute_group_advantages
from rftstream.queries.audits.audit import audit
from rftstream.queries.catalog.finding import GroupRow
from rftstream.queries.curves.history import History
from rftstream.queries.decisions.run_difference import compare
from rftstream.queries.decisions.side_by_side import RunSide
from rftstream.studio import plot_page
from rftstream.studio.access import StudioRole
from rftstream.studio.app import PAGES as OF_RUN
from rftstream.studio.pages import list_pages, run_pages
from rftstream.studio.pages.page import GROUP, PageOfRun
from rftstream.studio.plot_page import MAX_REPORT_BYTES
from rftstream.studio.rendering import why
from rftstream.studio.watched_run import WatchedRun
from rftstream.testing import MemoryRun, Simulation
from tests.suite.each import each
from tests.unit.studio.studio_scene import client, make_config, rules, watch
from tests.unit.synthetic import SyntheticLog

HOSTILE = '<script>alert("x")</script>\u202egnirts \u200f مرحبا 👩\u200d🚀 " onmouseover=1 \'</pre></textarea>'
LONG = 7_000_000


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Simulation, WatchedRun, TestClient]]:
    simulation = Simulation(make_config(), folder=tmp_path_factory.mktemp("run"), seed=3)
    simulation.run()
    watched = watch(simulation)
    watched.follow_once()
    with client([watched]) as browser:
        yield simulation, watched, browser
    watched.stop()


def addresses(simulation: Simulation) -> list[str]:
    outcome = next(
        one for one in simulation.messages("outcomes") if isinstance(one, GroupOutcome) and one.batch_sequence == 1
    )
    group = outcome.group_id
    parts = {
        f"/groups/{GROUP}": f"/groups/{group}",
        f"/rollouts/{GROUP}/{{sibling:count}}": f"/rollouts/{group}/1",
        f"/rollouts/{GROUP}/{{sibling:count}}/text": f"/rollouts/{group}/1/text",
        "/problems/{taskset}/{problem:count}": f"/problems/sums/{group.split('/')[2]}",
        "/versions/{version:count}": "/versions/2",
        "/batches/{batch:count}": "/batches/1",
        "/charts.csv": "/charts.csv?show=Loss",
        "/dead/{letter:path}": "",
        "/evaluations/{evaluation}": "/evaluations",  # samples are in the store of a run in memory
        "/find": f"/find?id={group}/0",
    }
    return [f"/runs/demo{parts.get(path, path)}" for path, page in OF_RUN.items() if not page.fresh]


@pytest.mark.slow
def test_every_page_now_and_as_it_was(finished: tuple[Simulation, WatchedRun, TestClient]) -> None:
    simulation, _, browser = finished
    for address in addresses(simulation):
        for moment in ("", "v3"):
            asked = address + ("&" if "?" in address else "?") + f"as_of={moment}" if moment else address
            answer = browser.get(asked)
            assert answer.status_code in (200, 302, 303), (asked, answer.text[:300])
            is_page = "html" in answer.headers.get("content-type", "") and "content-disposition" not in answer.headers
            if answer.status_code == 200 and is_page:
                assert "<style" not in answer.text and " style=" not in answer.text and "<script>" not in answer.text
                assert not re.search(r"\son[a-z]+=", answer.text), asked
                assert "undefined" not in answer.text.lower()


def test_numbers_are_those_of_audit_and_status(finished: tuple[Simulation, WatchedRun, TestClient]) -> None:
    simulation, watched, browser = finished
    report = audit(simulation.transport())
    shown = numbers(browser.get("/runs/demo").text)
    for name in ("groups", "rollouts"):
        balance = getattr(report, name)
        for fate in ("admitted", "trained", "pending", "filtered", "expired", "dead"):
            assert shown[f"{name}.{fate}"] == getattr(balance, fate)
    assert shown["version"] == report.version
    status = watched.snapshot.status
    assert status is not None and status.to_json()["version"] == shown["version"]
    assert f'data-seen="{watched.snapshot.revision}"' in browser.get("/runs/demo").text, "what the page has seen"
    past = numbers(browser.get("/runs/demo?as_of=v3").text)
    assert past["version"] == 3 and past["groups.trained"] == 6


@each(
    ("role", "address", "more"),
    [
        (StudioRole.viewer, "", []),
        (StudioRole.viewer, "/requests", ["Requests"]),  # the page that is shown
        (StudioRole.annotator, "", ["Questions"]),
        (StudioRole.operator, "", ["Questions", "Requests"]),
    ],
)
def test_only_pages_with_something_to_show(
    finished: tuple[Simulation, WatchedRun, TestClient], role: StudioRole, address: str, more: list[str]
) -> None:
    """Main pages are those of users; dead letters, questions and requests stand apart, if there are any."""
    with client([finished[1]], rules(local_role=role)) as browser:
        page = browser.get(f"/runs/demo{address}").text
    main, operations = (
        re.findall(r"<a [^>]*>([^<]+)</a>", part)
        for part in re.findall(r'<nav aria-label="(?:Pages|Operations).*?</nav>', page, re.DOTALL)
    )
    assert main == ["Overview", "Rollouts", "Problems", "Checkpoints", "Evaluations", "Charts"]
    assert [name for name in operations if name != "Dead letters"] == ["Flow", *more]
    status = finished[1].snapshot.status
    assert status is not None and ("Dead letters" in operations) is bool(status.dead_letters)


@each(
    ("address", "said"),
    [
        ("", r"<p>last step; first [\d.]+</p>"),
        ("", r"tokens/s, over its last \d+ s</p>"),
        ("/flow", r"[\d.]+ records/s</span><span>\d+ records in 6 batches</span>"),
        ("/problems", r'order=hardest">mean reward</a>'),
        ("/problems?order=hardest", r'order=easiest">mean reward</a>'),
        ("/problems", r"<small>best</small>(?s:.*)<small>worst</small>"),
        ("/problems?reward_to=2", r"[1-9]\d* of \d+ problems have groups and such a mean reward"),
        ("/problems?reward_from=2&as_of=v2", r">0 of [1-9]\d* problems have groups and such a mean reward"),
        (
            "/problems?doubtful=1&text=a",
            r">0 of [1-9]\d* problems have groups, no attempt that got 0.5, and most attempts",
        ),
        ("/versions", r"<small>best</small> [^<]*</b> <i>"),
    ],
)
def test_numbers_say_what_they_are(
    finished: tuple[Simulation, WatchedRun, TestClient], address: str, said: str
) -> None:
    page = finished[2].get(f"/runs/demo{address}").text
    assert re.search(said, page), page[page.index("<h1") :]


def test_of_versions_that_are_all_equal_none_is_named_the_best(
    finished: tuple[Simulation, WatchedRun, TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {}
    for count in (0, 3):
        for module in (list_pages, run_pages):
            monkeypatch.setattr(
                module, "without_best", lambda results, n=count: {one.evaluation: n for one in results if n}
            )
        pages = [finished[2].get(f"/runs/demo{at}?n={count}").text for at in ("/evaluations", "")]  # kept by address
        said[count] = ("the best version" in pages[0], "the same for all 3 versions;" in pages[1])
    assert said == {0: (True, False), 3: (False, True)}


@each(
    ("asked", "page"),
    [
        ("sums/4", "problems/sums/4"),
        ("as+%26%20apples", "rollouts?text=as+%26+apples"),
        ("", "rollouts"),
    ],
)
def test_a_problem_is_found_by_its_name_and_answers_by_a_text(
    finished: tuple[Simulation, WatchedRun, TestClient], asked: str, page: str
) -> None:
    found = finished[2].get(f"/runs/demo/find?id={asked}")
    assert (found.status_code, found.headers["location"]) == (303, f"/runs/demo/{page}")


@each(
    ("reason", "rewards", "said"),
    [
        ("zero_variance", (0.0,) * 8, "zero_variance: all 8 rewards are 0"),
        ("zero_variance", (0.5, None, 0.5), "zero_variance: all 2 rewards are 0.500"),
        ("complete", (1.0,) * 8, "all 8 rewards are 1: nothing to compare"),
        ("zero_variance", (), "zero_variance"),
        ("complete", (1.0, 0.0), "complete"),
        (None, (), ""),
    ],
)
def test_a_group_without_a_gradient_says_why(reason: str | None, rewards: tuple[float | None, ...], said: str) -> None:
    group = SimpleNamespace(reason=reason, siblings=[SimpleNamespace(reward=reward) for reward in rewards])
    assert why(cast(GroupRow, group)) == said


def test_a_list_that_is_followed_stays_where_it_is(finished: tuple[Simulation, WatchedRun, TestClient]) -> None:
    first = finished[2].get("/runs/demo/rollouts?order=oldest").text
    further = re.search(r'<a rel="next" href="([^"]+)"', first)
    assert further is not None
    second = finished[2].get(further[1].replace("&amp;", "&")).text
    assert f'hx-get="{further[1]}"' in second and "no such rollouts" not in second.lower()


def numbers(page: str) -> dict[str, int]:
    found = re.findall(r'data-number="([a-z.]+)">(?:<a [^>]*>)?([\d,]+)', page)
    return {name: int(value.replace(",", "")) for name, value in found}


def test_charts_hold_the_recorded_values(finished: tuple[Simulation, WatchedRun, TestClient]) -> None:
    simulation, watched, browser = finished
    assert watched.history is not None
    steps = watched.history.history().steps
    panels = {panel["title"]: panel for panel in browser.get("/runs/demo/charts.json").json()}
    [line] = panels["Reward"]["lines"]
    assert line["x"] == [step.name.version for step in steps]
    assert line["y"] == pytest.approx([step.metrics["reward"] for step in steps], rel=1e-5)
    assert panels["Evaluations"]["lines"]
    picture = browser.get("/runs/demo/charts").text
    assert picture.count("<polyline") >= 4, "curves are there without scripts, too"
    main, _, folded = picture.partition('<details class="theme"')
    assert "<b>Evaluations" in main and folded.count("<details") >= 3
    table = browser.get("/runs/demo/charts.csv?show=Reward").text.splitlines()
    assert table[0] == "version (trained batches),Reward (mean of scored rollouts with filtered ones)"
    assert len(table) == len(steps) + 1
    assert browser.get("/runs/demo/charts.csv?show=Loss&over=time").text.startswith("wall time (s),")
    assert "expected one of Reward," in browser.get("/runs/demo/charts.csv?show=Nothing").text
    chosen = browser.get("/runs/demo/charts.json?show=Loss&show=Rates&smooth=5").json()
    assert [panel["title"] for panel in chosen] == ["Loss", "Rates"] and chosen[0]["lines"][0]["mean"]
    del simulation


def test_the_report_is_one_small_file_without_secrets(
    finished: tuple[Simulation, WatchedRun, TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "arithmetic")  # the value of a setting
    answer = finished[2].get("/runs/demo/report.html?as_of=v5")
    text = answer.text
    assert answer.headers["content-disposition"] == 'attachment; filename="demo-report.html"'
    assert 50_000 < len(answer.content) < MAX_REPORT_BYTES and "<link" not in text and " src=" not in text
    assert "<dt>tasksets.sums.source</dt><dd>***</dd>" in text and "arithmetic" not in text
    for part in (
        "<b>best</b>",
        "<b>worst</b>",
        "<b>sampled</b>",
        "digest of tokenizer",
        "not finished",
        ">held-out</th>",
    ):
        assert part in text, part


def test_the_report_says_what_is_wrong_as_the_overview_does(
    finished: tuple[Simulation, WatchedRun, TestClient],
) -> None:
    pages = [finished[2].get(f"/runs/demo{page}").text for page in ("", "/report.html", "/report.html?as_of=v5")]
    here, sent, past = [re.findall(r'<p class="(trouble(?: severe)?)"><b>([^<]+)</b>', page) for page in pages]
    assert here == sent and ("trouble", "3 dead letters") in sent, sent
    assert 'aria-label="What is wrong"' in pages[1] and 'aria-label="What is wrong"' not in pages[2] and not past


@pytest.mark.slow
def test_a_report_of_very_many_values_keeps_fewer_of_each_line(
    finished: tuple[Simulation, WatchedRun, TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, watched, browser = finished
    assert watched.history is not None
    (step, *_) = watched.history.history().steps
    names = [f"{kind}/{number}" for kind in ("metric", "part", "reward", "reward_std") for number in range(6)]
    steps = tuple(
        replace(
            step, name=VersionName(trainer_epoch=1, version=version), recorded_at=1000.0 + version,
            metrics={**step.metrics, **{name: math.sin(version * (1 + len(name))) for name in names}},
        )
        for version in range(1, 1001)
    )  # fmt: skip
    monkeypatch.setattr(plot_page, "MAX_REPORT_BYTES", 600_000)
    monkeypatch.setattr(PageOfRun, "charted", History(steps=steps, resumes=(), evaluations=(), current=steps[-1]))
    answer = browser.get("/runs/demo/report.html?as_of=v4")
    assert answer.status_code == 200 and 300_000 < len(answer.content) < 600_000


@each(
    ("address", "status", "said"),
    [
        ("/runs/other", 404, "there are demo"),
        ("/runs/demo/groups/sums/0/999/0", 404, "no group"),
        ("/runs/demo/groups/sums/0/x/0", 404, ""),
        ("/runs/demo/versions/99", 404, "the newest is 6"),
        ("/runs/demo/dead/a/b/0/1", 404, "no dead letter"),
        ("/runs/demo?as_of=yesterday", 400, "expected a version"),
        ("/runs/demo?as_of=v77", 400, "no such version"),
        ("/runs/demo?as_of=-1e11", 400, "expected a version"),
        ("/runs/demo?as_of=1e300", 400, "expected a version"),
        ("/runs/demo?as_of=9999-12-31T23:59:59-23:59", 400, "expected a version"),
        (f"/runs/demo/problems/sums/{'9' * 30}", 404, ""),
        ("/runs/demo/find?id=%3Cscript%3E/", 404, "&lt;script&gt;"),
        ("/runs/demo/groups?before=x&fate=nonsense&reason=%27%22", 200, "No such groups"),
        ("/runs/demo/problems?order=;drop&skip=-1", 200, "problems have groups"),
        ("/nothing", 404, '<a href="/">to the runs</a>'),
        ("/runs/none/problems", 404, '<a href="/">to the runs</a>'),
        ("/runs/demo/versions/77", 404, '<a href="/runs/demo">to demo</a>'),
    ],
)
def test_what_is_not_there(
    finished: tuple[Simulation, WatchedRun, TestClient], address: str, status: int, said: str
) -> None:
    answer = finished[2].get(address)
    assert answer.status_code == status and said in answer.text
    assert "<script>" not in answer.text


# --------------------------------------------------------------------------------------------- what rollouts say


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[TestClient]:
    """A group in a batch: one hostile sibling, one very long one; and a dead letter."""
    memory = MemoryRun(make_config(), folder=tmp_path)
    memory.put_manifest()
    log = SyntheticLog(memory.transport(), partitions=4, group_size=2)
    log.step(0, resumed=True)
    one, two = log.siblings(0)
    problem = Problem(messages=(ChatMessage(role="user", content=HOSTILE),), answer=HOSTILE, info={"solution": HOSTILE})
    log.put("tasks", *(Task(ids=ids, problem=problem, sampling=Sampling(), seed=1) for ids in (one, two)))
    ids = [b % 256 for b in b"abc"] * 700
    segment = Segment(
        token_ids=Array.of(ids, "int32"),
        behavior_logprobs=Array.of([0.0] + [-0.25] * (len(ids) - 1), "float32"),
        loss_mask=Array.of([0] + [1] * (len(ids) - 1), "uint8"),
        versions=(VersionSpan(start=1, count=len(ids) - 1, trainer_epoch=1, version=0),),
    )
    rollouts = {
        one: Rollout(ids=one, status=RolloutStatus.completed, problem=problem, segments=(segment,), num_tokens=2099,
                     sampling=Sampling(), turns=(Turn(role="assistant", content=HOSTILE),), error=None),
        two: Rollout(ids=two, status=RolloutStatus.truncated, problem=problem, segments=(segment,), num_tokens=2099,
                     sampling=Sampling(), turns=(Turn(role=HOSTILE, content="x" * LONG),)),
    }  # fmt: skip
    for ids_, rollout, reward in ((one, rollouts[one], 1.0), (two, rollouts[two], 0.25)):
        log.put("rollouts", rollout)
        verdict = Verdict(reward=reward, scorer=HOSTILE, scorer_version="1", parts={HOSTILE: reward, "b": 0.0})
        log.put("verified", VerifiedRollout(ids=ids_, rollout=rollout, verdict=verdict, detail=HOSTILE))
    group = one.group_id
    log.put_all([
        *(("batches", Experience(ids=ids_, batch_sequence=0, share=0, position=i, loss_kind=LossKind.rl,
                                 segments=(segment,), reward=reward, sampling=Sampling()), None)
          for i, (ids_, reward) in enumerate(((one, 1.0), (two, 0.25)))),
        ("outcomes", GroupOutcome(group_id=group, taskset="sums", sequence=0, result=GroupResult.batched,
                                  reason=HOSTILE, batch_sequence=0, group_size=2, rollouts=tuple(
            RolloutSummary(rollout_id=ids_.rollout_id, num_tokens=2099, status=RolloutStatus.completed, reward=reward)
            for ids_, reward in ((one, 1.0), (two, 0.25)))), None),
        ("batches", BatchManifest(batch_sequence=0, share=0, num_shares=1, count=2, digest="sha256:" + "0" * 64,
                                  groups=(group,), num_groups=1, total_groups=1), None),
    ])  # fmt: skip
    log.trained[1] = 1
    log.step(1, metrics={"reward": 0.5, HOSTILE: 1.0})
    headers = (("h", HOSTILE.encode()),)
    log.put("dead", DeadLetter(
        topic="rollouts", partition=0, offset=0, key=b"k", value=b"<script>\xff", headers=headers, role="verifier",
        reason="error", detail=HOSTILE * 20, tries=2,
    ))  # fmt: skip
    watched = watch(memory)
    watched.follow_once()
    assert not watched.snapshot.error
    with client([watched], rules(local_role=StudioRole.operator)) as browser:
        yield browser
    watched.stop()


PAGES = (
    "/runs/demo",
    "/runs/demo/groups",
    "/runs/demo/rollouts?text=%3Cscript%3E",
    "/runs/demo/rollouts?order=longest&tool=%22%3E&after=1,2",
    "/runs/demo/problems?text=%3C",
    "/runs/demo/groups/sums/0/0/0",
    "/runs/demo/rollouts/sums/0/0/0/0",
    "/runs/demo/rollouts/sums/0/0/0/1?color=advantage",
    "/runs/demo/problems/sums/0",
    "/runs/demo/versions/1",
    "/runs/demo/dead",
    "/runs/demo/dead/verifier/rollouts/0/0",
    "/runs/demo/questions",
    "/runs/demo/questions/label/sums/0/0/0/0",
    "/runs/demo/questions/correction/sums/0/0/0/0",
    "/runs/demo/questions/correction/sums/0/0/0/1",
    "/runs/demo/questions/pair/sums/0/0/0/0%2B1",
    "/runs/demo/requests",
)


@pytest.mark.parametrize("address", PAGES)
def test_what_a_rollout_says_stays_text(hostile: TestClient, address: str) -> None:
    answer = hostile.get(address)
    assert answer.status_code == 200, answer.text[:500]
    assert "<script>" not in answer.text
    assert answer.text.count("</textarea>") == answer.text.count("<textarea"), "it ends no field"
    assert " onmouseover=1" not in answer.text.replace("&#34; onmouseover=1", ""), "it ends no attribute"
    assert len(answer.content) < 600_000, "a page is bounded, whatever a rollout said"
    assert "default-src 'none'" in answer.headers["content-security-policy"]


@pytest.mark.parametrize("address", ["groups/sums/0/0/0", "rollouts/sums/0/0/0/0", "problems/sums/0"])
def test_all_columns_of_a_problem_are_shown(hostile: TestClient, address: str) -> None:
    assert "<summary>other columns of the problem: solution</summary>" in hostile.get(f"/runs/demo/{address}").text


def test_a_very_long_answer_is_not_compared(hostile: TestClient) -> None:
    address, own = "/runs/demo/questions/correction/sums/0/0/0/0", {"origin": "http://testserver"}
    shown = hostile.post(address, data={"correction": "x" * 450_000, "show": "1"}, headers=own)
    assert "too long to be compared" in shown.text and "<ins>" not in shown.text
    short = hostile.post(address, data={"correction": HOSTILE, "show": "1"}, headers=own)
    assert "<script>" not in short.text and "nothing is sent yet" in short.text


def test_long_text_is_cut_and_there_as_a_file(hostile: TestClient) -> None:
    page = hostile.get("/runs/demo/rollouts/sums/0/0/0/1").text
    assert f"and {LONG - 20_000:,} characters more" in page
    whole = hostile.get("/runs/demo/rollouts/sums/0/0/0/1/text")
    assert len(whole.text) > LONG and whole.headers["content-type"].startswith("text/plain")
    assert (
        "attachment" in whole.headers["content-disposition"] and "sandbox" in whole.headers["content-security-policy"]
    )


def test_tokens_carry_their_numbers(hostile: TestClient) -> None:
    import numpy as np

    page = hostile.get("/runs/demo/rollouts/sums/0/0/0/0?color=logprob").text
    titles = re.findall(r'<i class="t ([^"]*)" title="([^"]*)">([^<]*)</i>', page)
    assert len(titles) == 1500 and "of 2,100" in page
    assert re.search(r"<dt>advantage</dt><dd>-?[\d.]+</dd>", page)
    assert titles[0][0] == "given" and "not trained on" in titles[0][1]
    up = compute_group_advantages(np.array([1.0, 0.25]), np.array([0, 0]))[0]
    style, numbers_, text = titles[1]
    assert (style, text) == ("l0", "b")
    assert "logprob -0.2500" in numbers_ and "version 0 (epoch 1)" in numbers_ and f"advantage {up:.4f}" in numbers_
    further = hostile.get("/runs/demo/rollouts/sums/0/0/0/0?from=1500&color=version").text
    assert len(re.findall(r'<i class="t [^"]*" title="', further)) == 600
    assert hostile.get("/runs/demo/rollouts/sums/0/0/0/0?segment=9&from=99999999").status_code == 200


def test_it_says_where_each_number_stands(hostile: TestClient) -> None:
    page = hostile.get("/runs/demo/rollouts/sums/0/0/0/0").text
    for place in ("tasks[0]@0", "rollouts[0]@0", "verified[0]@0", "outcomes[0]@0"):
        assert place in page
    assert "computed here by grpo from the rewards of the group in batch 0" in page


def test_the_lineage_goes_both_ways(hostile: TestClient) -> None:
    version = hostile.get("/runs/demo/versions/1").text
    assert "/runs/demo/groups/sums/0/0/0" in version and "batches[0]@0 to 2" in version
    group = hostile.get("/runs/demo/groups/sums/0/0/0").text
    assert "/runs/demo/versions/1" in group and "/runs/demo/rollouts/sums/0/0/0/1" in group
    rollout = hostile.get("/runs/demo/rollouts/sums/0/0/0/1").text
    assert "/runs/demo/versions/1" in rollout and "/runs/demo/groups/sums/0/0/0" in rollout


# --------------------------------------------------------------------------------------------- several runs


def test_a_mean_says_what_was_not_scored(tmp_path: Path) -> None:
    memory = MemoryRun(make_config(), folder=tmp_path)
    memory.put_manifest()
    log = SyntheticLog(memory.transport(), partitions=4)
    log.step(0, resumed=True)
    log.flow(0)
    log.batch(0, [0])
    log.step(1, metrics={"reward": 0.5})
    log.admit(1, 1)  # pending, with nothing to show yet
    log.put("evals", EvalResult(
        evaluation="held-out", name=VersionName(trainer_epoch=1, version=1), num_tasks=16, num_samples=2,
        num_unscored=16, metrics={"mean": 1.0}, generations=None,
    ))  # fmt: skip
    watched = watch(memory)
    watched.follow_once()
    with client([watched]) as browser:
        newest = browser.get("/runs/demo").text.rpartition("Newest groups")[2]
        assert "trained" in newest and "pending" not in newest
        assert "16 problems</p>" in browser.get("/runs/demo").text
        assert 'evaluation held-out</th><td class="n">1, best 1 at v1</td>' in browser.get("/compare?run=demo").text
        for address in ("", "/versions", "/versions/1"):
            assert "16 of 32 samples unscored" in browser.get(f"/runs/demo{address}").text, address
        result = browser.get("/api/v1/runs/demo").json()["evaluations"]["held-out"]
        assert (result["num_unscored"], result["num_tasks"] * result["num_samples"]) == (16, 32)
    watched.stop()


def test_two_pages_do_not_say_different_things_of_one_run(tmp_path: Path) -> None:
    runs = []
    for number in (1, 2):
        memory = MemoryRun(make_config(), folder=tmp_path / str(number))
        memory.put_manifest()
        log = SyntheticLog(memory.transport(), partitions=4)
        log.step(0, resumed=True)
        for version in range(1, 41):
            log.batch(version - 1, [version - 1])
            log.step(version, metrics={"reward": version / 100})
        for version in (20, 40):
            name = VersionName(trainer_epoch=1, version=version)
            log.put("evals", EvalResult(
                evaluation="held-out", name=name, num_tasks=16, num_samples=1, num_unscored=0, metrics={"mean": 0.25},
                generations=None,
            ))  # fmt: skip
        runs.append(watch(memory, f"demo~{number}"))
        runs[-1].follow_once()
    with client(runs) as browser:
        (reward,) = re.findall(r'reward</h2><p class="big">([^<]*)</p>', browser.get("/runs/demo~1").text)
        assert reward == "0.385" and browser.get("/").text.count(f'<td class="n">{reward}</td>') == 2, "mean of a tenth"
        for address in ("/runs/demo~1", "/compare?run=demo~1&run=demo~2", "/runs/demo~1/report.html"):
            assert "the same for all 2 versions" in browser.get(address).text, address
        assert "the best version" not in browser.get("/runs/demo~1/evaluations").text
        assert RunSide("x", version=40, rewards=[version / 100 for version in range(11, 41)]).last_tenth == 0.385
        first, second = (run.look(lambda opened, _: opened) for run in runs)
        assert compare(first, second).to_text().count("the same for all 2 versions") == 2
    for run in runs:
        run.stop()


@pytest.mark.slow
def test_several_runs(tmp_path: Path) -> None:
    runs: list[WatchedRun] = []
    for number in (1, 2):
        settings: dict[str, Any] = {"trainer": {"backend": "fake", "lr": number * 1e-6}}
        simulation = Simulation(make_config(**settings), folder=tmp_path / str(number), seed=number)
        simulation.run()
        runs.append(watch(simulation, f"demo~{number}"))
        runs[-1].follow_once()
    with client(runs) as browser:
        listed = browser.get("/").text
        assert "/runs/demo~1" in listed and "/runs/demo~2" in listed
        compared = browser.get("/compare?run=demo~1&run=demo~2").text
        assert "trainer.lr" in compared and compared.count("<polyline") >= 2
        assert [re.search(rf">{text}</td>", compared) is not None for text in (r"1e-06 \(default\)", "2e-06")] == [
            True
        ] * 2
        (row,) = re.findall(r"time, first to last step</th>(.*)</tr>", compared)
        assert len(re.findall(r">\d+ (?:s|min)</td>", row)) == 2
        data = {panel["title"]: panel for panel in browser.get("/compare.json?run=demo~1&run=demo~2").json()}
        assert [line["label"] for line in data["Reward"]["lines"]] == ["demo~1", "demo~2"]
        assert browser.get("/compare?run=nobody").status_code == 200
    for run in runs:
        run.stop()


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    memory = MemoryRun(make_config(), folder=tmp_path)
    watched = watch(memory)
    with client([watched]) as browser:
        assert browser.get("/").status_code == 302
        assert "<b>reading the log</b> 0 %" in browser.get("/runs/demo").text
        watched.follow_once()
        for page in ("", "/groups", "/versions", "/charts.json"):
            assert "has not begun" in browser.get(f"/runs/demo{page}").text
        memory.put_manifest()
        watched.follow_once()
        begun = browser.get("/runs/demo").text
        assert "no step yet" in begun and "not recorded" not in begun
    watched.stop()


def test_a_run_that_cannot_be_opened_says_why() -> None:
    def broken() -> Any:
        raise RuntimeError("<b>no disk</b>")

    watched = WatchedRun("demo", broken)
    watched.follow_once()
    with client([watched]) as browser:
        page = browser.get("/runs/demo").text
        assert "&lt;b&gt;no disk&lt;/b&gt;" in page and "cannot be looked at" in page
    watched.stop()
