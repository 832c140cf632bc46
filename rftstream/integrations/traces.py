"""Sends the spans of a run to a collector over OTLP: HTTP with protobuf, which every tracing system accepts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rftstream.errors import ConfigError, RftError, pip_install
from rftstream.http.address import split_url
from rftstream.http.client import BUSY, HttpClient, RequestFailed, pause_s
from rftstream.queries.traces.spans import Span, SpanReader, Value
from rftstream.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

DEFAULT_URL = "http://localhost:4318"
PATH = "/v1/traces"
PER_REQUEST = 512
TRIES = 6
PAUSE_S = 0.5
"""Seconds before the second try, twice as long before each further one."""
ANSWER_S = 30.0
MAX_ANSWER_BYTES = 1 << 20


class CollectorError(RftError):
    """A collector did not accept spans. Nothing is lost: the spans can be made again."""

    retriable = True


@dataclass(slots=True)
class Sent:
    """Counts of the sent spans."""

    spans: int = 0
    traces: int = 0


class Collector:
    """A collector at an address. Headers, such as those with keys, come only from the environment."""

    def __init__(self, url: str | None = None, env: Mapping[str, str] = os.environ) -> None:
        """`url` is the collector's address, or its address for traces. Without it, the standard's environment variables
        give the address. ConfigError if it is invalid, or if the package is missing."""
        try:
            from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
            from opentelemetry.util.re import parse_env_headers
        except ImportError:
            command = pip_install("rftstream[traces]")
            raise ConfigError(f"traces: OpenTelemetry is not installed; {command}") from None
        self._encode = encode_spans
        whole = None if url else env.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
        base = url or env.get("OTEL_EXPORTER_OTLP_ENDPOINT") or DEFAULT_URL
        self.url = whole or _with_path(base)
        address = split_url(self.url)
        if address is None:
            raise ConfigError(f"--otlp {self.url}: expected http://HOST:PORT or https://HOST:PORT")
        if address.username or address.password:
            raise ConfigError("--otlp: expected no password in the address; put it into OTEL_EXPORTER_OTLP_HEADERS")
        given = env.get("OTEL_EXPORTER_OTLP_TRACES_HEADERS") or env.get("OTEL_EXPORTER_OTLP_HEADERS") or ""
        self._http = HttpClient(address, max_bytes=MAX_ANSWER_BYTES)
        self._headers = {**parse_env_headers(given, liberal=True), "content-type": "application/x-protobuf"}

    def send(self, spans: Sequence[ReadableSpan]) -> None:
        """Send the spans to the collector. CollectorError if it did not accept them after several tries."""
        body, trouble = self._encode(spans).SerializeToString(), ""
        for number in range(TRIES):
            if number:
                time.sleep(pause_s(number, PAUSE_S))
            try:
                answer = self._http.ask("POST", "", body, headers=self._headers, timeout_s=ANSWER_S)
            except RequestFailed as error:
                trouble = str(error)
                continue
            if answer.status < 300:  # a redirect is refused
                self._check(answer.body)
                return
            trouble = f"HTTP {answer.status} {answer.body[:200].decode(errors='replace')}".strip()
            if answer.status not in BUSY:
                break
        raise CollectorError(
            f"{self.url}: {len(spans)} spans were not taken: {trouble}; is a collector for OTLP over HTTP there? Send "
            "them again when it is: the ids stay the same"
        )

    def _check(self, content: bytes) -> None:
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

        try:
            partial = ExportTraceServiceResponse.FromString(content).partial_success
        except DecodeError:  # some answer with text
            return
        if partial.rejected_spans:
            raise CollectorError(f"{self.url}: {partial.rejected_spans} spans were refused: {partial.error_message}")


def _with_path(base: str) -> str:
    """Return an address with the path for traces. The part after `?` is kept."""
    address, mark, query = base.partition("?")
    has_path = urlsplit(address).path.rstrip("/").endswith(PATH)
    return (address if has_path else address.rstrip("/") + PATH) + mark + query


def send_new(reader: SpanReader, collector: Collector, sent: Sent, tell: Callable[[], None]) -> None:
    """Send the spans that became complete since the reader's last poll. `tell` is called after each request."""
    convert = _converter(reader.resource)
    spans = reader.read()
    while some := tuple(islice(spans, PER_REQUEST)):
        collector.send([convert(span) for span in some])
        sent.spans += len(some)
        sent.traces += sum(span.parent is None for span in some)
        tell()


def _converter(common: Mapping[str, Value]) -> Callable[[Span], ReadableSpan]:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

    resource = Resource({"service.name": "rftstream", "service.version": __version__, **common})
    scope, flags = InstrumentationScope("rftstream", __version__), TraceFlags(TraceFlags.SAMPLED)

    def convert(span: Span) -> ReadableSpan:
        context, parent = (
            None if key is None else SpanContext(key.trace_id, key.span_id, is_remote=False, trace_flags=flags)
            for key in (span.key, span.parent)
        )
        return ReadableSpan(
            name=span.name,
            context=context,
            parent=parent,
            resource=resource,
            attributes=span.attributes,
            links=[
                Link(SpanContext(key.trace_id, key.span_id, is_remote=True, trace_flags=flags)) for key in span.links
            ],
            kind=SpanKind.INTERNAL,
            status=Status() if span.error is None else Status(StatusCode.ERROR, span.error),
            start_time=round(span.start_s * 1e9),
            end_time=round(span.end_s * 1e9),
            instrumentation_scope=scope,
        )

    return convert
