"""The common parts of the pages of one run: the run, the moment, the catalog, and the answer."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from starlette.concurrency import run_in_threadpool
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from rftstream.queries.catalog.database import CatalogReader
from rftstream.queries.catalog.moments import Moment
from rftstream.queries.curves.history import History, HistoryReader
from rftstream.studio.access import StudioRole, Viewer
from rftstream.studio.rendering import address, render
from rftstream.studio.watched_run import BEHIND_S, RunSnapshot, WatchedRun

TABS = {
    "": "Overview",
    "rollouts": "Rollouts",
    "problems": "Problems",
    "versions": "Checkpoints",
    "evaluations": "Evaluations",
    "charts": "Charts",
}
"""Last part of the address -> title of the main pages of a run."""
OPERATIONS = {
    "flow": "Flow",
    "dead": "Dead letters",
    "notes": "Notes",
    "questions": "Questions",
    "requests": "Requests",
}
"""The same of the pages about how the run works, and about the people beside it."""


class CountConvertor(IntegerConvertor):
    """A count in an address: 0 or more, with no more digits than databases accept."""

    regex = "[0-9]{1,15}"


register_url_convertor("count", CountConvertor())

GROUP = "{taskset}/{taskset_pass:count}/{problem:count}/{attempt:count}"
"""A group in an address."""
MAX_FIELDS = 200
"""Most fields of a form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOfRun:
    """A request for a page of a run. `page_of_run` makes it, and page functions take it."""

    request: Request
    run: WatchedRun
    moment: Moment
    opened: CatalogReader | None
    """The catalog. None: there is none yet."""
    revision: int
    """The run's revision before any data of the page was read. Browsers ask for changes after it."""
    only_now: bool = False
    """Whether the page always shows the present, as pages of waiting requests do."""

    def tabs(self, tab: str) -> list[dict[str, str]]:
        """Return the main pages, and those of operations, without empty ones. `tab`: the page that is shown."""
        config, status, role = self.run.config, self.snapshot.status, self.viewer.role
        has = {
            "evaluations": config is None or bool(config.evaluations),
            "notes": bool(self.run.notes.notes()),
            "dead": status is not None and bool(status.dead_letters),
            "questions": role >= StudioRole.annotator or (config is not None and config.feedback is not None),
            "requests": role >= StudioRole.operator or (status is not None and status.control.state is not None),
        }
        return [
            {part: title for part, title in pages.items() if part == tab or has.get(part, True)}
            for pages in (TABS, OPERATIONS)
        ]

    @property
    def viewer(self) -> Viewer:
        """Return the viewer."""
        found = viewer_of(self.request)
        assert found is not None, "the guard lets nobody else pass"
        return found

    @property
    def catalog(self) -> CatalogReader:
        """Return the catalog of a run that has begun. Before that, only a page that says so is shown."""
        assert self.opened is not None, "a page waits until the run has begun"
        return self.opened

    @property
    def snapshot(self) -> RunSnapshot:
        """Return the newest snapshot of the run."""
        return self.run.snapshot

    @property
    def history(self) -> History:
        """Return steps and evaluations at the moment."""
        return self._read(HistoryReader.history)

    @property
    def charted(self) -> History:
        """Return the history for curves, with a limited number of steps."""
        return self._read(HistoryReader.charted)

    @property
    def glanced(self) -> History:
        """Return the history with the first and the newest steps alone."""
        return self._read(HistoryReader.glance)

    def _read(self, read: Callable[[HistoryReader, float], History]) -> History:
        reader = self.run.history
        if reader is None:
            return History(steps=(), resumes=(), evaluations=(), current=None)
        return read(reader, self.moment.at_s)

    @property
    def num_partitions(self) -> int:
        """Return the number of partitions of a rollout's topics."""
        status = self.snapshot.status
        manifest = None if status is None else status.control.manifest
        return 1 if manifest is None else max(1, manifest.partitions)

    @property
    def group_id(self) -> str:
        """Return the group in the address."""
        params = self.request.path_params
        return "/".join(str(params[name]) for name in ("taskset", "taskset_pass", "problem", "attempt"))

    def asked(self, name: str, default: str = "") -> str:
        """Return a value of the query."""
        return self.request.query_params.get(name, default)

    def number(self, name: str) -> int | None:
        """Return a number of the query, or None if it is missing or invalid."""
        text = self.asked(name)
        return int(text) if text.isdecimal() and text.isascii() and len(text) < 16 else None

    def href(self, *parts: object, **query: object) -> str:
        """Return the address of a page of this run, at the same moment unless `as_of` names another."""
        return address("runs", self.run.name, *parts, **{"as_of": self.moment.text, **query})

    def again(self, **changes: object) -> str:
        """Return the address of this page, or that with some changes of its query, from the first of its rows on."""
        places = ("before", "skip", "after") if changes else ()
        kept = {name: value for name, value in self.request.query_params.items() if name not in places}
        return address(self.request.url.path.lstrip("/"), **{**kept, **changes})

    def answer(self, template: str, tab: str, title: str, *, slider: bool = False, **values: Any) -> Response:
        """Return the page. `slider`: whether it offers earlier moments."""
        history = self.run.history
        return answer_page(
            self.request,
            template,
            title,
            **values,
            tab=tab,
            tabs=self.tabs(tab),
            run=self.run,
            snapshot=self.snapshot,
            revision=self.revision,
            moment_=self.moment,
            href=self.href,
            again=self.again,
            here=self.request.url.path,
            slider=slider,
            may_annotate=self.viewer.role >= StudioRole.annotator,
            may_operate=self.viewer.role >= StudioRole.operator,
            notes_on=lambda target: self.run.notes.notes(target=target),
            kept=[
                (k, v)
                for k, v in self.request.query_params.multi_items()
                if k not in ("as_of", "before", "skip", "after")
            ],
            newest_version=0 if history is None else history.newest_version,
        )


def answer_page(
    request: Request,
    template: str,
    title: str,
    *,
    code: int = 200,
    headers: Mapping[str, str] | None = None,
    **values: Any,
) -> Response:
    """Return a page: of one run if `values` name it, else of all runs or of none."""
    shown = {"run": None, "tab": "", "tabs": (), **values}
    runs, viewer = request.app.state.runs, viewer_of(request)
    return HTMLResponse(render(template, **shown, title=title, runs=runs, viewer=viewer), code, headers)


def viewer_of(request: Request) -> Viewer | None:
    """Return who makes the request; None before a login."""
    viewer: Viewer | None = request.state.viewer
    return viewer


@contextmanager
def page_of_run(request: Request, *, only_now: bool = False) -> Iterator[PageOfRun]:
    """Yield the data for a page of a run, and close its catalog afterwards. HTTPException for an unknown run,
    ConfigError for an invalid moment. `only_now`: the page shows the present, whatever moment is requested."""
    name = request.path_params["run"]
    run: WatchedRun | None = request.app.state.runs.get(name)
    if run is None:
        raise HTTPException(404, f"no run {name!r} here; there are {', '.join(request.app.state.runs)}")
    run.touch()
    revision = run.snapshot.revision
    moment = run.moment("" if only_now else request.query_params.get("as_of", "")[:100])
    catalog = run.catalog()
    try:
        yield PageOfRun(request=request, run=run, moment=moment, opened=catalog, revision=revision, only_now=only_now)
    finally:
        if catalog is not None:
            catalog.close()


MAX_CACHED, MAX_CACHED_BYTES = 64, 400_000
"""Most cached pages, and the largest size of a cached page."""


class PageCache:
    """A cache of rendered pages, so that fifty browsers with the same event cost one rendering.

    The app has one. A page is reused as long as its run has not changed, which is checked once a second. While one
    thread renders a page, other threads that need it wait.
    """

    def __init__(self) -> None:
        self._pages: OrderedDict[tuple[str, ...], tuple[object, Response]] = OrderedDict()
        self._locks: OrderedDict[tuple[str, ...], threading.Lock] = OrderedDict()
        self._lock = threading.Lock()

    def page(self, request: Request, run: WatchedRun, make: Callable[[], Response]) -> Response:
        """Return the page for a request. `make` renders it if no cached page can be used."""
        viewer = viewer_of(request)
        key = (str(request.url), "" if viewer is None else f"{viewer.name} {viewer.role}")
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
            self._locks.move_to_end(key)
            while len(self._locks) > 2 * MAX_CACHED:
                self._locks.popitem(last=False)
        with lock:
            revision = (run.snapshot.revision, run.notes.revision, len(run.feedback.votes), run.behind_s() // BEHIND_S)
            known = self._pages.get(key)
            if known is not None and known[0] == revision:
                return known[1]
            found = make()
            if found.status_code == 200 and len(found.body) <= MAX_CACHED_BYTES:
                with self._lock:
                    self._pages[key] = (revision, found)
                    self._pages.move_to_end(key)
                    while len(self._pages) > MAX_CACHED:
                        self._pages.popitem(last=False)
            return found


Values = Mapping[str, Any]
"""The data of a page, which its template shows."""
Form = Mapping[str, Sequence[str]]
"""The fields of a submitted form."""


@dataclass(frozen=True, slots=True)
class RunPage:
    """A page of a run, in the table of the app."""

    make: Callable[[PageOfRun], Values | Response]
    """Returns the data of the page, or the complete answer. A `title` in the data replaces the one below."""
    template: str = ""
    tab: str = ""
    """Last part of the address of its main page."""
    title: str = ""
    fresh: bool = False
    """Whether it is rendered anew for each request and always shows the present, since somebody may have written
    meanwhile."""
    slider: bool = False
    """Whether it offers earlier moments. Each page that is not `fresh` shows the one that its address names."""

    def shown(self, page: PageOfRun, made: Values | Response) -> Response:
        """Return the answer to a request for the page, from its data."""
        if isinstance(made, Response):
            return made
        return page.answer(self.template, self.tab, slider=self.slider, **{"title": self.title, **made})

    def endpoint(self, request: Request) -> Response:
        """Answer a request for the page."""

        def rendered() -> Response:
            with page_of_run(request, only_now=self.fresh) as page:
                if page.opened is None:
                    return page.answer("waiting.html", "", page.run.name)
                try:
                    return self.shown(page, self.make(page))
                except HTTPException as error:
                    if error.status_code == 404 and not page.snapshot.is_read:
                        error.detail += f"; {page.snapshot.share_read:.0%} of the log is read: try again in a moment"
                    raise

        run: WatchedRun | None = request.app.state.runs.get(request.path_params["run"])
        if self.fresh or run is None:  # without the run, the page says so
            return rendered()
        run.touch()
        cache: PageCache = request.app.state.pages
        return cache.page(request, run, rendered)


@dataclass(frozen=True, slots=True)
class RunForm:
    """A form on a page of a run, in the table of the app."""

    role: StudioRole
    """Role that is needed for the form."""
    do: Callable[[PageOfRun, Form], Values | Response]
    """Executes the form, and returns the answer or the new data of the page."""

    def endpoint(self, of_run: RunPage) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint of the form on this page."""

        async def answer(request: Request) -> Response:
            check_role(request, self.role)
            form = parse_form(await request.body())

            def done() -> Response:
                with page_of_run(request, only_now=True) as page:
                    if page.opened is None:
                        raise HTTPException(409, f"{page.run.name}: the log is being read, expected a little patience")
                    return of_run.shown(page, self.do(page, form))

            return await run_in_threadpool(done)

        return answer


def check_role(request: Request, role: StudioRole) -> None:
    """Raise HTTPException if the viewer's role is lower than this one."""
    viewer = viewer_of(request)
    if viewer is None or viewer.role < role:
        name = "nobody" if viewer is None else f"{viewer.name}, {viewer.role.name}"
        raise HTTPException(403, f"{name}: expected the role {role.name}")


def parse_form(body: bytes) -> Form:
    """Return the fields of a form. HTTPException if the body is no form."""
    try:
        return parse_qs(body.decode("utf-8"), max_num_fields=MAX_FIELDS, errors="strict")
    except ValueError as error:
        raise HTTPException(400, f"got no form ({error}), expected fields as a browser sends them") from None


def word_in_query(page: PageOfRun, name: str, known: Sequence[str]) -> str:
    """Return a query parameter that is one of the known words, or an empty text if it is missing."""
    given = page.request.query_params.get(name)
    if given is not None and given not in known:
        raise HTTPException(400, f"{name}: got {given[:40]!r}, expected one of {', '.join(known)}")
    return given or ""


def count_in_query(page: PageOfRun, name: str) -> int | None:
    """Return a query parameter that is a count, or None if it is missing."""
    given, found = page.request.query_params.get(name), page.number(name)
    if given is not None and found is None:
        raise HTTPException(400, f"{name}: got {given[:40]!r}, expected a count of at most 15 digits")
    return found
