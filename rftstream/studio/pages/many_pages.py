"""The pages about several runs and about the viewer: all runs, comparisons, logging in and out."""

from __future__ import annotations

from urllib.parse import parse_qs, urlencode

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from rftstream.queries.curves.evaluations import newest_and_best, without_best
from rftstream.queries.curves.history import History
from rftstream.queries.curves.page_facts import differing_settings
from rftstream.studio.charts import Chart, runs_chart
from rftstream.studio.guard import COOKIE, GuardRules, session_name
from rftstream.studio.pages.page import answer_page
from rftstream.studio.watched_run import WatchedRun

COMPARED = ("Reward", "Evaluations", "Completion length", "Staleness", "Entropy", "Rates")
MAX_COMPARED = 6


def runs(request: Request) -> Response:
    """All runs of this studio with their main numbers. With only one run, its own page is shown."""
    known: dict[str, WatchedRun] = request.app.state.runs
    if len(known) == 1:
        return RedirectResponse(f"/runs/{next(iter(known))}", 302)
    for run in known.values():
        run.touch()
    return answer_page(request, "runs.html", "Runs", watched=list(known.values()))


def _chosen(request: Request) -> list[WatchedRun]:
    """Return the runs to compare: those in the query, else the first two."""
    known: dict[str, WatchedRun] = request.app.state.runs
    names = [name for name in request.query_params.getlist("run") if name in known][:MAX_COMPARED] or list(known)[:2]
    chosen = [known[name] for name in dict.fromkeys(names)]
    for run in chosen:
        run.touch()
    return chosen


def _compared(request: Request, chosen: list[WatchedRun]) -> tuple[dict[str, History], list[Chart]]:
    readers = {run.name: run.history for run in chosen if run.history is not None}
    by_time = request.query_params.get("over") == "time"
    charted = {name: reader.charted() for name, reader in readers.items()}
    charts = [runs_chart(title, charted, by_time=by_time) for title in COMPARED]
    return {name: reader.glance() for name, reader in readers.items()}, [chart for chart in charts if chart.curves]


def compare(request: Request) -> Response:
    """Compare runs: main numbers, curves in one chart, settings that differ."""
    chosen = _chosen(request)
    histories, charts = _compared(request, chosen)
    differing = differing_settings([run.look(lambda opened, _: opened.config) for run in chosen])
    query = urlencode([("run", run.name) for run in chosen])
    return answer_page(
        request,
        "compare.html",
        "Compare",
        chosen=chosen,
        names=[run.name for run in chosen],
        query=query,
        charts=charts,
        histories=histories,
        results={name: newest_and_best(history.evaluations) for name, history in histories.items()},
        equal={name: without_best(history.evaluations) for name, history in histories.items()},
        differing=differing,
        by_time=request.query_params.get("over") == "time",
    )


def compare_data(request: Request) -> Response:
    """The compared curves as data, for the browser's own drawing."""
    return JSONResponse([chart.data for chart in _compared(request, _chosen(request))[1]])


async def login(request: Request) -> Response:
    """The page that asks for a token, and handles the one that was entered."""
    rules: GuardRules = request.app.state.rules
    if request.method != "POST":
        return answer_page(request, "login.html", "Log in", wrong="")
    address = request.client.host if request.client is not None else "?"
    if wait_s := rules.login_limits.take(address):
        wrong = f"too many tries; again in {int(wait_s) + 1} s"
        return answer_page(request, "login.html", "Log in", code=429, wrong=wrong)
    given = parse_qs((await request.body()).decode("utf-8", "replace")).get("token", [""])[0].strip()
    if rules.tokens.find(given) is None:
        return answer_page(request, "login.html", "Log in", code=401, wrong="this is no token of this studio")
    done = RedirectResponse("/", 303)
    done.set_cookie(
        COOKIE,
        rules.sessions.begin(given),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return done


def logout(request: Request) -> Response:
    """End the session of a browser."""
    request.app.state.rules.sessions.end(session_name(request.headers))
    done = RedirectResponse("/login", 303)
    done.delete_cookie(COOKIE)
    return done
