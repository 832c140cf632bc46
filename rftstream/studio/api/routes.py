"""The interface for programs, /api/v1: the data and forms of the pages, as JSON. The routes and their description are
made from the table ENDPOINTS."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rftstream.queries.catalog.counts import count_fates
from rftstream.queries.catalog.finding import FATES, PAGE, GroupFilter, find_groups
from rftstream.queries.curves.evaluations import result_numbers
from rftstream.queries.records.rollout_view import ShownMessage, read_rollout
from rftstream.queries.reference.source_text import class_docs
from rftstream.queries.state.flow_map import what_is_wrong
from rftstream.studio import asking
from rftstream.studio.access import StudioRole
from rftstream.studio.api import people as api_people
from rftstream.studio.api import types as api_types
from rftstream.studio.api.types import (
    AnnotatorList,
    DrainBody,
    ErrorAnswer,
    EvaluateBody,
    EvaluateDone,
    FateCounts,
    Glance,
    GroupItem,
    GroupPage,
    MessageItem,
    NoteBody,
    NoteItem,
    QuestionPage,
    RetryBody,
    RetryDone,
    RolloutDetail,
    RolloutItem,
    RunItem,
    StateBody,
    StateDone,
    VoteBody,
    VoteDone,
    Wrong,
    convert,
)
from rftstream.studio.pages.page import GROUP, PageOfRun, check_role, count_in_query, page_of_run, word_in_query
from rftstream.studio.pages.rollout_pages import asked_group, asked_rollout
from rftstream.studio.voting import STATES
from rftstream.studio.watched_run import WatchedRun
from rftstream.version import __version__

ROOT = "/api/v1"
MAX_REWARDS = 100


# --------------------------------------------------------------------------------------------- runs, groups, rollouts


def runs(request: Request) -> list[RunItem]:
    """All runs of this studio."""
    known: Mapping[str, WatchedRun] = request.app.state.runs
    for run in known.values():
        run.touch()
    return [
        RunItem(
            name=run.name,
            state=None if run.snapshot.status is None else run.snapshot.status.state,
            version=None if run.history is None else run.history.history().version,
            error=run.snapshot.error,
        )
        for run in known.values()
    ]


def glance(page: PageOfRun) -> Glance:
    """The run at a glance."""
    assert page.catalog is not None
    counts, history, status = count_fates(page.catalog, page.moment), page.glanced, page.snapshot.status
    newest = {result.evaluation: result_numbers(result) for result in history.evaluations}
    status = status if page.moment.is_now else None
    return Glance(
        name=page.run.name,
        as_of=page.moment.text,
        version=history.version,
        groups=convert(counts.groups, FateCounts),
        rollouts=convert(counts.rollouts, FateCounts),
        rewards=tuple(history.rewards()[-MAX_REWARDS:]),
        evaluations=newest,
        wrong=tuple(convert(one, Wrong) for one in what_is_wrong(status, now=time.time())),
        status=None if status is None else status.to_json(),
    )


def groups(page: PageOfRun) -> GroupPage:
    """Groups, newest first."""
    assert page.catalog is not None
    wanted = GroupFilter(
        fate=word_in_query(page, "fate", FATES), reason=page.asked("reason")[:100], taskset=page.asked("taskset")[:100]
    )
    found = find_groups(page.catalog, page.moment, wanted, before=count_in_query(page, "before"))
    before = found[-1].sequence if len(found) == PAGE else None
    return GroupPage(groups=tuple(convert(row, GroupItem) for row in found), before=before)


def group(page: PageOfRun) -> GroupItem:
    """A group with its siblings."""
    return convert(asked_group(page), GroupItem)


def rollout(page: PageOfRun) -> RolloutDetail:
    """A rollout with its messages and its verdict."""
    group_row, row = asked_rollout(page)
    view = page.run.look(
        lambda run, reader: read_rollout(run.transport, group_row, row, reader, num_partitions=page.num_partitions)
    )
    verdict = view.verdict
    return RolloutDetail(
        rollout=convert(row, RolloutItem),
        group_id=group_row.group_id,
        batch=group_row.batch,
        problem=tuple(map(_message, view.problem)),
        answer=view.answer,
        turns=tuple(map(_message, view.turns)),
        num_turns=view.num_turns,
        missing=view.missing,
        reward=None if verdict is None else verdict.reward,
        parts={} if verdict is None else verdict.parts,
        roles={} if verdict is None else verdict.roles,
        scorer=None if verdict is None else verdict.scorer,
        places=view.places,
    )


def _message(shown: ShownMessage) -> MessageItem:
    return MessageItem(
        role=shown.role,
        text="".join(text for text, _ in shown.pieces),
        num_tokens=shown.num_tokens,
        calls=shown.calls,
    )


# --------------------------------------------------------------------------------------------- the table


COUNT: Mapping[str, Any] = {"type": "integer", "minimum": 0, "maximum": 10**15 - 1}
TEXT: Mapping[str, Any] = {"type": "string"}
AS_OF = {"as_of": (TEXT, "A version (v12) or a time (2026-01-31T12:00:00Z); else now.")}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint of the interface. `answers`: type of the answer; `takes`: type of the body, for a write."""

    path: str
    do: Callable[..., Any]
    answers: Any
    role: StudioRole = StudioRole.viewer
    takes: Any = None
    only_now: bool = False
    query: Mapping[str, tuple[Mapping[str, Any], str]] = field(default_factory=dict)
    """Name of a parameter -> its JSON Schema and its meaning."""


OF_GROUPS = {
    "fate": ({**TEXT, "enum": FATES}, "Only those that became this."),
    "reason": (TEXT, "Only those that were decided for this reason."),
    "taskset": (TEXT, "Only those of this taskset."),
    "before": (COUNT, "Only those with a smaller sequence."),
    **AS_OF,
}
OF_QUESTIONS = {
    "state": ({**TEXT, "enum": STATES}, "Those that stand so; else open ones."),
    "skip": (COUNT, "Leave out so many."),
}
OF_NOTES = {
    "target": (TEXT, "Only those on this rollout, group or version."),
    "tag": (TEXT, "Only those with this tag."),
}
RUN, ROLLOUT = "/runs/{run}", f"/runs/{{run}}/rollouts/{GROUP}/{{sibling:count}}"
ANNOTATOR, OPERATOR = StudioRole.annotator, StudioRole.operator

ENDPOINTS: Sequence[Endpoint] = (
    Endpoint("/runs", runs, list[RunItem]),
    Endpoint(RUN, glance, Glance, query=AS_OF),
    Endpoint(f"{RUN}/groups", groups, GroupPage, query=OF_GROUPS),
    Endpoint(f"{RUN}/groups/{GROUP}", group, GroupItem, query=AS_OF),
    Endpoint(ROLLOUT, rollout, RolloutDetail, query=AS_OF),
    Endpoint(f"{RUN}/questions", api_people.questions, QuestionPage, only_now=True, query=OF_QUESTIONS),
    Endpoint(f"{RUN}/feedback", api_people.feedback, VoteDone, ANNOTATOR, VoteBody, only_now=True),
    Endpoint(f"{RUN}/annotators", api_people.annotators, AnnotatorList, ANNOTATOR, only_now=True),
    Endpoint(f"{RUN}/notes", api_people.notes, list[NoteItem], only_now=True, query=OF_NOTES),
    Endpoint(f"{RUN}/notes", api_people.note, NoteItem, ANNOTATOR, NoteBody, only_now=True),
    Endpoint(f"{RUN}/pause", asking.pause, StateDone, OPERATOR, StateBody, only_now=True),
    Endpoint(f"{RUN}/unpause", asking.unpause, StateDone, OPERATOR, StateBody, only_now=True),
    Endpoint(f"{RUN}/drain", asking.drain, StateDone, OPERATOR, DrainBody, only_now=True),
    Endpoint(f"{RUN}/evaluate", asking.evaluate, EvaluateDone, OPERATOR, EvaluateBody, only_now=True),
    Endpoint(f"{RUN}/retry", asking.retry, RetryDone, OPERATOR, RetryBody, only_now=True),
)


def api_routes() -> list[Route]:
    """Return the routes of the interface and of its description."""
    routes = [Route(f"{ROOT}/openapi.json", lambda request: _json(description()), methods=["GET"])]
    return routes + [
        Route(f"{ROOT}{one.path}", _endpoint(one), methods=["GET" if one.takes is None else "POST"])
        for one in ENDPOINTS
    ]


def _endpoint(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        check_role(request, endpoint.role)
        body = () if endpoint.takes is None else (await _body(request, endpoint.takes),)
        return _json(await run_in_threadpool(_done, endpoint, request, body))

    answer.__name__ = endpoint.do.__name__
    return answer


def _done(endpoint: Endpoint, request: Request, body: tuple[Any, ...]) -> Any:
    if "{run}" not in endpoint.path:
        return endpoint.do(request)
    with page_of_run(request, only_now=endpoint.only_now) as page:
        if page.opened is None:
            why = page.snapshot.error or "the log is being read, or the run has not begun"
            raise HTTPException(503, f"{page.run.name}: {why}; expected a run that can be shown", {"retry-after": "1"})
        return endpoint.do(page, *body)


async def _body(request: Request, wanted: Any) -> Any:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, f"content-type: got {kind[:100]!r}, expected application/json")
    try:
        return msgspec.json.decode(await request.body(), type=wanted)
    except (msgspec.DecodeError, RecursionError) as error:
        raise HTTPException(400, f"body: {error}") from None


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


# --------------------------------------------------------------------------------------------- its description


@cache
def description() -> Mapping[str, Any]:
    """Return the OpenAPI description of the interface, made from ENDPOINTS and the types."""
    types = [
        ErrorAnswer,
        *(one.answers for one in ENDPOINTS),
        *(one.takes for one in ENDPOINTS if one.takes is not None),
    ]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(map(str, types), schemas, strict=True))
    for name, schema in components.items():
        for key, text in class_docs(getattr(api_types, name)).items():
            if key in schema.get("properties", {}):
                schema["properties"][key]["description"] = text
            else:  # a value of an enumeration
                schema["description"] = f"{schema.get('description', '')}\n{key}: {text}"
    paths: dict[str, dict[str, Any]] = {}
    for one in ENDPOINTS:
        method = "get" if one.takes is None else "post"
        paths.setdefault(ROOT + one.path.replace(":count", ""), {})[method] = _operation(one, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "rftstream studio",
            "version": __version__,
            "description": "Runs, groups, rollouts and questions, what people say of them, and what operators ask of "
            "a run. A token is sent as `Authorization: Bearer TOKEN`. Times are seconds since 1970.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],
    }


def _operation(endpoint: Endpoint, schema_of: Mapping[str, Any]) -> dict[str, Any]:
    refused = {"description": "Not done.", "content": {"application/json": {"schema": schema_of[str(ErrorAnswer)]}}}
    operation: dict[str, Any] = {
        "operationId": endpoint.do.__name__,
        "summary": (endpoint.do.__doc__ or "").strip(),
        "description": f"Needs the role {endpoint.role.name}.",
        "parameters": [*_path_parameters(endpoint.path), *_query_parameters(endpoint.query)],
        "responses": {
            "200": {
                "description": "Done.",
                "content": {"application/json": {"schema": schema_of[str(endpoint.answers)]}},
            },
            "default": refused,
        },
    }
    if endpoint.takes is not None:
        body = {"application/json": {"schema": schema_of[str(endpoint.takes)]}}
        operation["requestBody"] = {"required": True, "content": body}
        operation["security"] = [{"token": []}]
    return operation


def _path_parameters(path: str) -> list[dict[str, Any]]:
    names = [part.partition("}")[0] for part in path.split("{")[1:]]
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": COUNT if kind else TEXT,
        }
        for name, _, kind in (name.partition(":") for name in names)
    ]


def _query_parameters(query: Mapping[str, tuple[Mapping[str, Any], str]]) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "query", "description": text, "schema": schema} for name, (schema, text) in query.items()
    ]
