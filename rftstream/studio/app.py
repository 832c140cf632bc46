"""The web application: which address is which page, and what becomes of errors."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from rftstream.errors import ConfigError, RftError
from rftstream.studio.access import StudioRole
from rftstream.studio.api.routes import api_routes
from rftstream.studio.events import MAX_LISTENERS, RunEvents
from rftstream.studio.guard import API, GuardRules, RequestGuard, refuse
from rftstream.studio.pages import many_pages, question_pages, request_pages, rollout_pages, run_pages
from rftstream.studio.pages.page import GROUP, Form, PageCache, PageOfRun, form_page, fresh_page, run_page, viewer_of
from rftstream.studio.rendering import render
from rftstream.studio.watched_run import WatchedRun

ROUTES = {
    "": run_pages.glance,
    "/charts": run_pages.charts,
    "/charts.json": run_pages.chart_data,
    "/groups": run_pages.groups,
    f"/groups/{GROUP}": rollout_pages.group,
    f"/rollouts/{GROUP}/{{sibling:count}}": rollout_pages.rollout,
    f"/rollouts/{GROUP}/{{sibling:count}}/text": rollout_pages.rollout_text,
    "/problems": run_pages.problems,
    "/problems/{taskset}/{problem:count}": run_pages.problem,
    "/versions": run_pages.versions,
    "/versions/{version:count}": run_pages.version,
    "/batches/{batch:count}": run_pages.batch,
    "/evaluations": run_pages.evaluations,
    "/dead": run_pages.dead,
    "/dead/{letter:path}": run_pages.letter,
    "/find": rollout_pages.find,
}
"""Address below /runs/RUN -> the page. All of them only read."""

MAX_ERROR = 1_000
"""Characters of an error."""

QUESTION = f"/questions/{{kind}}/{GROUP}/{{siblings}}"

FRESH = {
    "/questions": question_pages.questions,
    "/questions/next": question_pages.next_question,
    "/annotators": question_pages.annotators,
    QUESTION: question_pages.question,
    "/requests": request_pages.requests,
}
"""Address below /runs/RUN -> a page that is made anew for each request, and has no past. These read, too."""

WRITES: dict[str, tuple[StudioRole, Callable[[PageOfRun, Form], Response]]] = {
    QUESTION: (StudioRole.annotator, question_pages.answer),
    "/requests": (StudioRole.operator, request_pages.ask),
    "/dead": (StudioRole.operator, request_pages.retry),
}
"""Address below /runs/RUN -> who may send a form there, and what does what it asks."""


def make_app(runs: Sequence[WatchedRun], rules: GuardRules, *, follow: bool = True) -> Starlette:
    """Return the application over these runs. `follow`: whether it starts and stops following them."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.events = events = RunEvents()
        for run in runs:
            events.attach(run)
            if follow:
                run.start()
        yield
        for run in runs:
            if follow:
                run.stop()

    app = Starlette(
        routes=[
            Route("/", many_pages.runs),
            Route("/compare", many_pages.compare),
            Route("/compare.json", many_pages.compare_data),
            Route("/login", many_pages.login, methods=["GET", "POST"]),
            Route("/logout", many_pages.logout, methods=["POST"]),
            *(Route(f"/runs/{{run}}{path}", run_page(make)) for path, make in ROUTES.items()),
            *(Route(f"/runs/{{run}}{path}", fresh_page(make)) for path, make in FRESH.items()),
            *(
                Route(f"/runs/{{run}}{path}", form_page(role, do), methods=["POST"])
                for path, (role, do) in WRITES.items()
            ),
            Route("/runs/{run}/events", events_of_run),
            *api_routes(),
            Mount("/static", _StaticFiles(directory=Path(__file__).parent / "static")),
        ],
        middleware=[Middleware(RequestGuard, rules=rules)],
        exception_handlers={HTTPException: _not_found, ConfigError: _not_found, RftError: _failed},
        lifespan=lifespan,
    )
    app.state.runs = {run.name: run for run in runs}
    app.state.rules = rules
    app.state.pages = PageCache()
    return app


async def events_of_run(request: Request) -> Response:
    """Tell a browser whenever the run has gone on."""
    run = request.app.state.runs.get(request.path_params["run"])
    events: RunEvents = request.app.state.events
    if run is None:
        return PlainTextResponse("no such run", 404)
    if events.num_listeners >= MAX_LISTENERS:
        return PlainTextResponse("too many browsers listen", 503, {"retry-after": "30"})
    last_id = request.headers.get("last-event-id") or request.query_params.get("seen", "")
    return StreamingResponse(events.stream(run, last_id[:20]), media_type="text/event-stream")


class _StaticFiles(StaticFiles):
    """Files that belong to this release, which a browser may keep for a while."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        answer = await super().get_response(path, scope)
        answer.headers["cache-control"] = "public, max-age=3600"
        return answer


def _not_found(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 400
    text = error.detail if isinstance(error, HTTPException) else str(error)
    headers = error.headers if isinstance(error, HTTPException) else None
    return _error(request, status, text, headers)


def _failed(request: Request, error: Exception) -> Response:
    return _error(request, 503, f"the run cannot be read now: {error}")


def _error(request: Request, status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return the answer to what cannot be done: JSON to programs, to people a page."""
    if request.url.path.startswith(API):
        return refuse(request.url.path, status, text[:MAX_ERROR], headers)
    page = render(
        "error.html",
        title="Not found" if status == 404 else "Not possible",
        text=text[:MAX_ERROR],
        status=status,
        runs=request.app.state.runs,
        run=None,
        tab="",
        tabs=(),
        viewer=viewer_of(request),
    )
    return HTMLResponse(page, status, headers)
