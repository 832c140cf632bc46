"""Spans go to a collector, over HTTP on loopback: all of a recorded run, in spite of trouble, and never with a key in
an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from rftstream.commands import cli
from rftstream.errors import ConfigError
from rftstream.integrations import traces
from rftstream.integrations.traces import Collector, CollectorError
from tests.e2e.test_recorded_run import unpack_recorded
from tests.loopback import Asked, HttpServer


class FakeCollector(HttpServer):
    """Takes what it is sent, after the answers that `before` tells."""

    def __init__(self) -> None:
        super().__init__(self.told)
        self.before: list[tuple[int, bytes]] = []
        self.taken: list[Asked] = []

    def told(self, asked: Asked) -> object:
        status, answer = self.before.pop(0) if self.before else (200, b"")
        if status == 200 and asked.path == "/v1/traces":
            self.taken.append(asked)
        return status, answer

    def requests(self) -> list[ExportTraceServiceRequest]:
        return [ExportTraceServiceRequest.FromString(one.body) for one in self.taken]

    def spans(self) -> list[Any]:
        return [span for one in self.requests() for of in one.resource_spans for scope in of.scope_spans
                for span in scope.spans]  # fmt: skip


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCollector]:
    monkeypatch.setattr(traces, "PAUSE_S", 0.01)
    with FakeCollector() as made:
        yield made


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return unpack_recorded(tmp_path)


def export(run: Path, *arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(cli, ["traces", "export", str(run), *arguments])
    assert done.exit_code == code, done.output
    return done.stdout if code == 0 else done.output


@pytest.mark.slow
def test_a_whole_run_twice_with_the_same_ids(run: Path, collector: FakeCollector) -> None:
    collector.before = [(503, b"busy"), (429, b"")]
    told = json.loads(export(run, "--otlp", collector.url, "--json"))
    first = collector.spans()
    assert told == {"url": collector.url + "/v1/traces", "spans": len(first), "traces": 24 + 6 + 1}
    roots = [span for span in first if not span.parent_span_id]
    names = ["batch", "evaluation", "group", "rollout", "step", "verdict", "weights"]
    assert sorted({span.name for span in first}) == names
    assert sum(span.name == "group" for span in roots) == 24
    assert all(len(span.trace_id) == 16 and len(span.span_id) == 8 for span in first)
    assert all(0 < span.start_time_unix_nano <= span.end_time_unix_nano for span in first)
    attributes = collector.requests()[0].resource_spans[0].resource.attributes
    resource = {one.key: one.value.string_value for one in attributes}
    assert (resource["service.name"], resource["rftstream.run"]) == ("rftstream", "recorded")
    collector.taken.clear()
    assert "at " + collector.url in export(run, "--otlp", collector.url + "/v1/traces")
    assert [(span.trace_id, span.span_id) for span in collector.spans()] == [
        (span.trace_id, span.span_id) for span in first
    ]


def test_a_run_that_is_over_needs_no_following(run: Path, collector: FakeCollector) -> None:
    assert "spans of 31 traces" in export(run, "--otlp", collector.url, "--follow")


def test_headers_come_from_the_environment(collector: FakeCollector) -> None:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20hidden"}
    made = Collector(env=env)
    made.send([])
    [sent] = collector.taken
    assert (sent.key, sent.headers["content-type"]) == ("Bearer hidden", "application/x-protobuf")
    collector.before = [(401, b"who are you?")]
    with pytest.raises(CollectorError, match="HTTP 401 who are you") as refused:
        made.send([])
    assert "hidden" not in str(refused.value)


def test_what_stands_behind_the_path_is_sent(collector: FakeCollector) -> None:
    for address in ("", "/v1/traces"):
        Collector(f"{collector.url}{address}?tenant=a&b=c", env={}).send([])
    assert [one.query for one in collector.taken] == ["tenant=a&b=c"] * 2


def test_what_a_collector_refuses_is_told(run: Path, collector: FakeCollector) -> None:
    answer = ExportTraceServiceResponse()
    answer.partial_success.rejected_spans = 7
    answer.partial_success.error_message = "too old"
    collector.before = [(200, answer.SerializeToString())]
    assert "7 spans were refused: too old" in export(run, "--otlp", collector.url, code=1)
    collector.before = [(400, b"no such thing")]
    assert "were not taken: HTTP 400 no such thing" in export(run, "--otlp", collector.url, code=1)


def test_nobody_is_there(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "PAUSE_S", 0.001)
    said = export(run, "--otlp", "http://127.0.0.1:9", code=1)
    assert "is a collector for OTLP over HTTP there?" in said
    assert "the ids stay the same" in said


@pytest.mark.parametrize(("url", "text"), [
    ("localhost:4318", "expected http://HOST:PORT"),
    ("ftp://x", "expected http://HOST:PORT"),
    ("http://me:hidden@x:1", "OTEL_EXPORTER_OTLP_HEADERS"),
])  # fmt: skip
def test_addresses_that_will_not_do(url: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as error:
        Collector(url, env={})
    assert "hidden" not in str(error.value)
