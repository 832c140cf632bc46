"""The field that finds: ids in any of their forms, batches that are not trained yet, and texts with any characters."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from rftstream.contracts.dead import DeadLetter
from rftstream.studio.access import StudioRole
from rftstream.testing import MemoryRun
from tests.suite.each import each
from tests.unit.studio.studio_scene import client, make_config, rules, watch
from tests.unit.synthetic import SyntheticLog

LETTER = DeadLetter(
    topic="rollouts", partition=0, offset=7, key=b"k", value=b"v", headers=(), role="verifier", reason="error",
    detail="it broke", tries=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """Three batches, of which two are trained; a dead letter."""
    memory = MemoryRun(make_config(), folder=tmp_path_factory.mktemp("run"))
    memory.put_manifest()
    log = SyntheticLog(memory.transport(), partitions=4, group_size=2)
    log.step(0, resumed=True)
    for batch in range(3):
        log.flow(batch)
        log.batch(batch, [batch])
    log.step(1)
    log.step(2)
    log.put("dead", LETTER)
    watched = watch(memory)
    watched.follow_once()
    assert not watched.snapshot.error
    with client([watched], rules(local_role=StudioRole.operator)) as found:
        yield found
    watched.stop()


@each(
    ("asked", "page"),
    [
        ("batch:1", "versions/2"),
        ("Batch: 1", "versions/2"),
        ("batch:2", "rollouts?batch=2"),
        ("V2", "versions/2"),
        ("version: 2", "versions/2"),
        ("sums", "problems?taskset=sums"),
        ("verifier/rollouts/0/7", "dead/verifier/rollouts/0/7"),
        ("no/such text", ""),
        ("batch:99", ""),
        ("verifier/rollouts/0/8", ""),
        ("17", ""),
    ],
)
def test_what_is_looked_for_is_found(browser: TestClient, asked: str, page: str) -> None:
    found = browser.get("/runs/demo/find", params={"id": asked})
    assert (found.status_code, found.headers.get("location", "")) == (
        (303, f"/runs/demo/{page}") if page else (404, "")
    )


def test_a_batch_that_is_not_there_says_which_are(browser: TestClient) -> None:
    for address in ("find?id=batch:99", "batches/99"):
        assert (
            "no batch 99 in this run at this moment; the newest is batch 2" in browser.get(f"/runs/demo/{address}").text
        )


def test_a_batch_that_waits_leads_to_its_rollouts(browser: TestClient) -> None:
    group = next(one for one in re.findall(r'href="/runs/demo/groups/([^"]+)"', browser.get("/runs/demo/groups").text))
    page = browser.get(f"/runs/demo/groups/{group}").text
    assert '<a href="/runs/demo/batches/2">batch 2</a>, not trained yet' in page
    assert browser.get("/runs/demo/batches/2").headers["location"] == "/runs/demo/rollouts?batch=2"
    assert "Of batch 2 alone, which is not trained yet." in browser.get("/runs/demo/rollouts?batch=2").text


@each("page", ["", "/rollouts", "/groups", "/problems", "/versions", "/dead", "/questions"])
def test_each_head_of_a_table_says_what_it_means(browser: TestClient, page: str) -> None:
    heads = re.findall(r'<th scope="col"([^>]*)>', browser.get(f"/runs/demo{page}").text)
    assert page == "/questions" or heads
    for head in heads:
        said = re.search(r' title="([^"]+)"', head)
        assert said is not None and len(html.unescape(said[1])) > 10, head
