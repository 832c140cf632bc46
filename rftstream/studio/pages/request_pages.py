"""The pages of operators: requests to the run, with their makers, and forms for new ones."""

from __future__ import annotations

import time
from collections.abc import Iterator

from starlette.responses import RedirectResponse, Response

from rftstream.contracts.control import Request
from rftstream.errors import ConfigError
from rftstream.launch.sessions.evaluation import parse_versions
from rftstream.runs.folder import OpenRun
from rftstream.service.control_view import ControlView, read_control
from rftstream.service.role import Log
from rftstream.studio import asking
from rftstream.studio.api.types import DrainBody, EvaluateBody, RetryBody, StateBody, StateDone
from rftstream.studio.pages.page import Form, PageOfRun, Values

MAX_SHOWN = 100


def requests(page: PageOfRun) -> Values:
    """Show the requests to the run with their makers, the open requests, and for operators forms for new ones."""

    def read(run: OpenRun, _: object) -> tuple[ControlView, list[Request], tuple[str, ...]]:
        waiting = list(_waiting(Log(run.transport), time.time()))
        return read_control(run.transport), waiting, tuple(run.config.evaluations)

    control, waiting, evaluations = page.run.look(read)
    return {
        "control": control,
        "state": "running" if control.state is None else str(control.state.state),
        "waiting": waiting[:MAX_SHOWN],
        "num_waiting": len(waiting),
        "evaluations": evaluations,
        "done": page.asked("done")[:300],
    }


def _waiting(log: Log, now: float) -> Iterator[Request]:
    """Yield the requests that are neither answered nor expired, oldest first."""
    found: dict[bytes, Request] = {}
    for record, message in log.rule.messages(log.control()):
        key = record.key or b""
        found.pop(key, None)
        if isinstance(message, Request) and message.expires_at > now:
            found[key] = message
    yield from found.values()


def ask(page: PageOfRun, form: Form) -> Response:
    """Send the run the request of a form: pause, unpause, drain or evaluate."""
    wanted, reason = _field(form, "ask"), _field(form, "reason")
    match wanted:
        case "pause":
            done = _state_text(asking.pause(page, StateBody(reason=reason)))
        case "unpause":
            done = _state_text(asking.unpause(page, StateBody(reason=reason)))
        case "drain":
            if "sure" not in form:
                raise ConfigError("drain: it is not taken back; expected a mark that it is meant")
            done = _state_text(asking.drain(page, DrainBody(sure="drain", reason=reason)))
        case "evaluate":
            done = _ask_evaluations(page, form)
        case _:
            known = "pause, unpause, drain, evaluate"
            raise ConfigError(f"ask: got {wanted[:40]!r}, expected one of {known}")
    return RedirectResponse(page.href("requests", done=done), 303)


def _state_text(done: StateDone) -> str:
    return f"{done.state} from now on" if done.changed else "it was so already"


def _ask_evaluations(page: PageOfRun, form: Form) -> str:
    text, evaluation = _field(form, "versions"), _field(form, "evaluation") or None
    versions = parse_versions(text) if text else []
    done = asking.evaluate(page, EvaluateBody(evaluation=evaluation, versions=versions, again="again" in form))
    return f"{done.asked:,} evaluations asked for" + (f", {done.known:,} have their result" if done.known else "")


def retry(page: PageOfRun, form: Form) -> Response:
    """Request that dead groups are put back: the named ones, or all that are still dead."""
    groups = list(form.get("group", ()))
    done = asking.retry(page, RetryBody(groups=groups, everything="everything" in form, sample="sample" in form))
    before = f", {done.put_back_before:,} were put back before" if done.put_back_before else ""
    text = f"{done.asked:,} dead groups asked to be put back{before}"
    return RedirectResponse(page.href("requests", done=text), 303)


def _field(form: Form, name: str) -> str:
    return form.get(name, ("",))[0].strip()
