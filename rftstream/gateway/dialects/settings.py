"""What becomes of each setting of a request: one table for each dialect, which its `read` follows and the docs show.

A setting is done as asked, or taken and recorded without another effect, or refused. What a table does not name is
recorded: clients send new settings each month, and most concern their makers' own servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rftstream.gateway.dialects.fields import MAX_ASKED_BYTES, Json, RequestRefused
from rftstream.roles.explorer.model_calls import canonical

ABSENT: tuple[Any, ...] = (None, False, [], {}, "", 0)
"""Values of a refused setting that ask for nothing."""
MAX_RECORDED = 64
"""Most settings of a call that are recorded."""


class Fate(StrEnum):
    """The ways in which a setting of a request can be treated."""

    honoured = "honoured"
    recorded = "recorded"
    refused = "refused"


@dataclass(frozen=True, slots=True)
class RequestSetting:
    """A line of a table. `honoured`, `recorded` and `refused` make it."""

    fate: Fate
    note: str
    """Effect of the setting, or why it has none. For a refused setting: the message to the client."""
    is_recorded: bool = False
    """Whether the call on the log has it."""
    passes: tuple[Any, ...] = ()
    """Values of a refused setting that are taken."""


Table = Mapping[str, RequestSetting]
"""Name of a setting -> its line. A name with a dot is a setting within another one."""


def honoured(note: str, *, is_recorded: bool = False) -> RequestSetting:
    """Return the line of a setting that is done as asked. Not recorded is what stands elsewhere on the log."""
    return RequestSetting(Fate.honoured, note, is_recorded)


def recorded(note: str) -> RequestSetting:
    """Return the line of a setting that is recorded with the call, and has no other effect."""
    return RequestSetting(Fate.recorded, note, True)


def refused(note: str, *passes: Any) -> RequestSetting:
    """Return the line of a setting that is refused, unless it asks for nothing or has one of these values."""
    return RequestSetting(Fate.refused, note, True, passes)


SAMPLING = recorded("sampling is the task's (`[sampling]`)")
COUNTED = recorded("for the bills and caches of its maker's servers")
NAMES = recorded("names whom or what the request is for")
FORM = recorded("the form of the answer stays as it is")
REASONING = recorded("how much the model reasons is its own and its template's affair")
CONTEXT = recorded("nothing is removed from the context: a prompt without room is refused")
NO_BANS = refused("tokens are sampled as the task says, and the recorded logprobs are of that; remove it")
CONSTRAINT = honoured("the policies `vllm` and `openai` constrain the tokens; others refuse it", is_recorded=True)
TOOL_CHOICE = honoured("`none` hides the tools; what else it says is recorded, and forces no call", is_recorded=True)
STOP = honoured("ends the answer before any of these", is_recorded=True)


def check(body: Json, table: Table) -> None:
    """Refuse a body with a setting that cannot be done."""
    for name, setting in table.items():
        if setting.fate is Fate.refused:
            value = value_of(body, name)
            if value not in ABSENT and value not in setting.passes:
                raise RequestRefused(f"{name}: {setting.note}")


def asked_for(body: Json, table: Table) -> dict[str, Any]:
    """Return the settings of a body that are recorded, also those that no table names. A large one is recorded as its
    size."""
    found: dict[str, Any] = {}
    elsewhere = {name for name, setting in table.items() if not setting.is_recorded}
    for name in sorted(body.keys() - elsewhere)[:MAX_RECORDED]:
        value = body[name]
        if value is not None:
            size = len(canonical(value))
            found[name[:64]] = value if size <= MAX_ASKED_BYTES else f"({size} bytes)"
    return found


def value_of(body: Json, name: str) -> Any:
    """Return a setting of a body by its name in a table; None if it is absent."""
    value: Any = body
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
