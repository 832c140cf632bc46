"""The web application: the address of each page, and the answers to errors."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from rftstream.errors import ConfigError, RftError
from rftstream.studio.access import StudioRole
from rftstream.studio.api.routes import api_routes
from rftstream.studio.events import MAX_LISTENERS, RunEvents
from rftstream.studio.guard import API, GuardRules, RequestGuard, refuse
from rftstream.studio.pages import (
    chart_pages,
    list_pages,
    many_pages,
    note_pages,
    question_pages,
    request_pages,
    rollout_pages,
    run_pages,
)
from rftstream.studio.pages.page import GROUP, PageCache, RunForm, RunPage, answer_page
from rftstream.studio.watched_run import WatchedRun

QUESTION = f"/questions/{{kind}}/{GROUP}/{{siblings}}"
ROLLOUT = f"/rollouts/{GROUP}/{{sibling:count}}"

PAGES = {
    "": RunPage(run_pages.glance, "glance.html", "", "Overview", slider=True),
    "/charts": RunPage(chart_pages.charts, "charts.html", "charts", "Charts"),
    "/charts.json": RunPage(chart_pages.chart_data),
    "/charts.csv": RunPage(chart_pages.chart_table),
    "/timeline": RunPage(chart_pages.timeline, "timeline.html", "charts", "Who was busy when", slider=True),
    "/report.html": RunPage(chart_pages.report),
    "/flow": RunPage(run_pages.flow, "flow.html", "flow", "Flow"),
    "/rollouts": RunPage(list_pages.rollouts, "rollouts.html", "rollouts", "Rollouts"),
    "/groups": RunPage(run_pages.groups, "groups.html", "rollouts", "Groups", slider=True),
    f"/groups/{GROUP}": RunPage(rollout_pages.group, "group.html", "rollouts", slider=True),
    ROLLOUT: RunPage(rollout_pages.rollout, "rollout.html", "rollouts"),
    f"{ROLLOUT}/text": RunPage(rollout_pages.rollout_text),
    "/problems": RunPage(run_pages.problems, "problems.html", "problems", "Problems", slider=True),
    "/problems/{taskset}/{problem:count}": RunPage(run_pages.problem, "problem.html", "problems"),
    "/versions": RunPage(run_pages.versions, "versions.html", "versions", "Checkpoints"),
    "/versions/{version:count}": RunPage(run_pages.version, "version.html", "versions"),
    "/batches/{batch:count}": RunPage(rollout_pages.batch),
    "/evaluations": RunPage(list_pages.evaluations, "evaluations.html", "evaluations", "Evaluations"),
    "/evaluations/{evaluation}": RunPage(list_pages.evaluation, "evaluation.html", "evaluations"),
    "/dead": RunPage(run_pages.dead, "dead.html", "dead", "Dead letters"),
    "/dead/{letter:path}": RunPage(run_pages.letter, "letter.html", "dead", "Dead letter"),
    "/find": RunPage(rollout_pages.find),
    "/questions": RunPage(question_pages.questions, "questions.html", "questions", "Questions", fresh=True),
    "/questions/next": RunPage(question_pages.next_question, fresh=True),
    "/annotators": RunPage(question_pages.annotators, "annotators.html", "questions", "Annotators", fresh=True),
    QUESTION: RunPage(question_pages.question, "question.html", "questions", fresh=True),
    "/notes": RunPage(note_pages.notes, "notes.html", "notes", "Notes", fresh=True),
    "/requests": RunPage(request_pages.requests, "requests.html", "requests", "Requests", fresh=True),
}
"""Address below /runs/RUN -> the page. Pages only read."""

FORMS = {
    QUESTION: RunForm(StudioRole.annotator, question_pages.answer),
    "/notes": RunForm(StudioRole.annotator, note_pages.write),
    "/requests": RunForm(StudioRole.operator, request_pages.ask),
    "/dead": RunForm(StudioRole.operator, request_pages.retry),
}
"""Address of a page -> its form."""

MAX_ERROR = 1_000
"""Most characters of an error."""


def make_app(runs: Sequence[WatchedRun], rules: GuardRules, *, follow: bool = True) -> Starlette:
    """Return the application over these runs. `follow`: whether it starts and stops to follow them."""

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
            *(Route(f"/runs/{{run}}{path}", page.endpoint) for path, page in PAGES.items()),
            *(
                Route(f"/runs/{{run}}{path}", form.endpoint(PAGES[path]), methods=["POST"])
                for path, form in FORMS.items()
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
    """Notify a browser of each change in the run."""
    run = request.app.state.runs.get(request.path_params["run"])
    events: RunEvents = request.app.state.events
    if run is None:
        return PlainTextResponse("no such run", 404)
    if events.num_listeners >= MAX_LISTENERS:
        return PlainTextResponse("too many browsers listen", 503, {"retry-after": "30"})
    last_id = request.headers.get("last-event-id") or request.query_params.get("seen", "")
    return StreamingResponse(events.stream(run, last_id[:20]), media_type="text/event-stream")


class _StaticFiles(StaticFiles):
    """Files of this release, which a browser may cache for a while."""

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
    """Return the answer for an error: JSON for programs, a page for people."""
    if request.url.path.startswith(API):
        return refuse(request.url.path, status, text[:MAX_ERROR], headers)
    title, text = "Not found" if status == 404 else "Not possible", text[:MAX_ERROR]
    place, _, name = request.url.path.removeprefix("/").partition("/")
    of_run = name.partition("/")[0] if place == "runs" and "/" in name else ""
    return answer_page(
        request, "error.html", title, code=status, headers=headers, text=text, status=status, of_run=of_run
    )
