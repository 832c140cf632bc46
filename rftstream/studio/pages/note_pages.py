"""Notes and tags: the page of all, and the form that adds one or takes one back. Programs use the same functions."""

from __future__ import annotations

from collections import Counter

from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from rftstream.errors import ConfigError
from rftstream.queries.catalog.finding import find_group
from rftstream.queries.catalog.moments import Moment
from rftstream.queries.traces.lineage import Target, parse_target
from rftstream.runs.notes import Note
from rftstream.studio.access import StudioRole
from rftstream.studio.pages.page import Form, PageOfRun, Values

MAX_NOTES = 200
"""Most notes on a page."""


def notes(page: PageOfRun) -> Values:
    """Return all notes, newest first, or those with one tag."""
    tag = page.asked("tag")[:40]
    found = page.run.notes.notes(tag=tag)
    tags = Counter(tag for note in page.run.notes.notes() for tag in note.tags)
    return {
        "address_of": lambda target: target_address(page, target),
        "found": found[:MAX_NOTES],
        "num_left_out": max(0, len(found) - MAX_NOTES),
        "tag": tag,
        "tags": tags,
    }


def write(page: PageOfRun, form: Form) -> Response:
    """Add the note of a form, or take one back, and show the page that the form was on."""
    texts = {name: values[0] for name, values in form.items()}
    if note_id := texts.get("remove"):
        note = remove_note(page, note_id)
    else:
        tags = texts.get("tags", "").replace(",", " ").split()
        note = add_note(page, texts.get("target", ""), texts.get("text", "").replace("\r\n", "\n"), tags)
    return RedirectResponse(page.href("notes") if "all" in texts else target_address(page, note.target), 303)


def add_note(page: PageOfRun, target: str, text: str, tags: list[str]) -> Note:
    """Add a note of the viewer. HTTPException if the run has no such target."""
    found = parse_target(target)
    if not _is_there(page, found):
        raise HTTPException(404, f"target: got {target[:200]!r}, expected a rollout, a group or a version of this run")
    return page.run.notes.add(target, text, tags, by=page.viewer.name)


def remove_note(page: PageOfRun, note_id: str) -> Note:
    """Take a note back: the viewer's own, and for operators any."""
    return page.run.notes.remove(note_id, by=page.viewer.name, any_writer=page.viewer.role >= StudioRole.operator)


def _is_there(page: PageOfRun, target: Target) -> bool:
    if target.kind == "version":
        return page.run.history is not None and 0 < target.version <= page.run.history.newest_version
    group = find_group(page.catalog, Moment(), target.group_id) if target.kind in ("rollout", "group") else None
    return group is not None and (target.sibling or 0) < len(group.siblings)


def target_address(page: PageOfRun, text: str) -> str:
    """Return the address of the page of a target."""
    try:
        target = parse_target(text)
    except ConfigError:
        return page.href("notes")
    if target.kind == "version":
        return page.href("versions", target.version)
    return page.href("rollouts" if target.kind == "rollout" else "groups", text)
