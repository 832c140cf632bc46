"""The pages of operators: what is asked of the run, by whom, and forms that ask it."""

from __future__ import annotations

import time
from collections.abc import Iterator

from starlette.responses import RedirectResponse, Response

from rftstream.contracts.control import DesiredState, Request
from rftstream.errors import ConfigError
from rftstream.launch.sessions.evaluation import parse_versions
from rftstream.runs.folder import OpenRun
from rftstream.service.control_view import ControlView, read_control
from rftstream.service.role import Log
from rftstream.studio.asking import evaluate_versions, retry_groups, set_state
from rftstream.studio.pages.page import Form, PageOfRun

STATES = {"pause": DesiredState.paused, "unpause": DesiredState.running, "drain": DesiredState.draining}
MAX_SHOWN = 100


def requests(page: PageOfRun) -> Response:
    """Show the requests to the run with their makers, the requests that are not done yet, and for operators forms for
    more."""

    def read(run: OpenRun, _: object) -> tuple[ControlView, list[Request], tuple[str, ...]]:
        waiting = list(_waiting(Log(run.transport), time.time()))
        return read_control(run.transport), waiting, tuple(run.config.evaluations)

    control, waiting, evaluations = page.run.look(read)
    return page.answer(
        "requests.html",
        "requests",
        "Requests",
        control=control,
        state="running" if control.state is None else str(control.state.state),
        waiting=waiting[:MAX_SHOWN],
        num_waiting=len(waiting),
        evaluations=evaluations,
        done=page.asked("done")[:300],
    )


def _waiting(log: Log, now: float) -> Iterator[Request]:
    """Yield the requests that were neither answered nor expired, oldest first."""
    found: dict[bytes, Request] = {}
    for record, message in log.in_force("control"):
        key = record.key or b""
        found.pop(key, None)
        if isinstance(message, Request) and message.expires_at > now:
            found[key] = message
    yield from found.values()


def ask(page: PageOfRun, form: Form) -> Response:
    """Ask the run for what a form says: pause, unpause, drain or evaluate."""
    wanted = _field(form, "ask")
    if wanted in STATES:
        done = _ask_state(page, wanted, form)
    elif wanted == "evaluate":
        done = _ask_evaluations(page, form)
    else:
        raise ConfigError(f"ask: got {wanted[:40]!r}, expected one of {', '.join((*STATES, 'evaluate'))}")
    return RedirectResponse(page.href("requests", done=done), 303)


def _ask_state(page: PageOfRun, wanted: str, form: Form) -> str:
    if wanted == "drain" and "sure" not in form:
        raise ConfigError("drain: it is not taken back; expected a mark that it is meant")
    state = STATES[wanted]
    is_new = set_state(page, state, reason=_field(form, "reason"))
    return f"{state} from now on" if is_new else "it was so already"


def _ask_evaluations(page: PageOfRun, form: Form) -> str:
    text, evaluation = _field(form, "versions"), _field(form, "evaluation") or None
    versions = parse_versions(text) if text else ()
    new, known = evaluate_versions(page, evaluation=evaluation, versions=versions, again="again" in form)
    return f"{new:,} evaluations asked for" + (f", {known:,} have their result" if known else "")


def retry(page: PageOfRun, form: Form) -> Response:
    """Ask for dead groups to be put back: those that are named, or all that are still dead."""
    new, before = retry_groups(page, form.get("group", ()), everything="everything" in form, sample="sample" in form)
    done = f"{new:,} dead groups asked to be put back" + (f", {before:,} were put back before" if before else "")
    return RedirectResponse(page.href("requests", done=done), 303)


def _field(form: Form, name: str) -> str:
    return form.get(name, ("",))[0].strip()
