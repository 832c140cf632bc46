"""The value of `reward =` in the run file: one reward, or several with the rule that makes one number of them.

    reward = "math"
    reward = { name = "exact", casefold = true }
    reward = [{ name = "well_formed", use = "gate" }, { name = "math" }, { name = "ngram_penalty", weight = 0.2 }]

Keys that are none of RewardUse's are settings of that reward, which differ from those in `[rewards.NAME]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from msgspec import Meta

from rftstream.config.parts import registry
from rftstream.errors import ConfigError

RewardNamed = str | dict[str, Any] | list[str | dict[str, Any]]
"""A reward as written in the run file."""


@dataclass(frozen=True, kw_only=True)
class RewardUse:
    """One reward of a taskset, and its part in the whole."""

    name: str
    weight: float = 1.0
    """Factor of its score, unless it is a gate or a check."""
    use: Literal["sum", "minimum", "gate", "check"] = "sum"
    """`sum`: its score is added. `minimum`: the smallest score of all rewards with this use is added. `gate`: if its
    score is less than `at_least`, the whole reward is `otherwise`, and rewards that are no gates are not computed.
    `check`: a second opinion on a `share` of the rollouts, which never counts; its distance from the whole reward
    becomes a metric."""
    at_least: float = 1.0
    otherwise: float = 0.0
    share: Annotated[float, Meta(gt=0, le=1)] = 0.05
    group: bool = False
    """For your own function or class: it is called once with all rollouts of a group, and compares them. A reward that
    declares `group = True` needs no such key."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Differences from `[rewards.NAME]`."""


OF_ONE_USE = {"at_least": ("gate",), "otherwise": ("gate",), "share": ("check",), "weight": ("sum", "minimum")}
"""Keys that have a meaning for one use only."""


def reward_uses(named: RewardNamed, where: str) -> list[RewardUse]:
    """Return the rewards that `named` holds, in order, at least one. ConfigError, with the place `where`, if `named` is
    invalid."""
    if isinstance(named, str):
        return [RewardUse(name=named)]
    many = named if isinstance(named, list) else [named]
    uses = [_use(one, f"{where}.{number}" if isinstance(named, list) else where) for number, one in enumerate(many)]
    if not uses:
        raise ConfigError(f"{where}: an empty list; name at least one reward")
    if not any(use.use in ("sum", "minimum") for use in uses):
        used = " and ".join(dict.fromkeys(f"{use.use}s" for use in uses))
        raise ConfigError(f"{where}: has only {used}, expected a reward that counts; add one without `use`")
    return uses


def reward_names(named: RewardNamed) -> list[str]:
    """Return the names of the rewards, even if their settings are invalid."""
    many: Sequence[Any] = named if isinstance(named, list) else [named]
    return [one if isinstance(one, str) else str(one.get("name", "")) for one in many]


def part_names(uses: Sequence[RewardUse]) -> list[str]:
    """Return the names of the rewards' parts in a verdict: the names without their module, numbered if a name
    repeats."""
    names: list[str] = []
    for use in uses:
        short = use.name.rpartition(":")[2]
        names.append(short if short not in names else f"{short}-{len(names) + 1}")
    return names


def reward_formula(uses: Sequence[RewardUse]) -> str:
    """Return in words how the rewards make one number: `1 math + 0.2 length_penalty, if well_formed >= 1`."""
    if len(uses) == 1 and uses[0].weight == 1.0:
        return uses[0].name
    terms = [f"{use.weight:g} {use.name}" for use in uses if use.use == "sum"]
    if least := [f"{use.weight:g} {use.name}" for use in uses if use.use == "minimum"]:
        terms.append(f"min({', '.join(least)})")
    gates = [f"{use.name} >= {use.at_least:g} (else {use.otherwise:g})" for use in uses if use.use == "gate"]
    checks = [f"{use.name} on {use.share:.0%}" for use in uses if use.use == "check"]
    guarded = " + ".join(terms) + (f", if {' and '.join(gates)}" if gates else "")
    return guarded + (f", checked by {', '.join(checks)}" if checks else "")


def _use(values: str | Mapping[str, Any], where: str) -> RewardUse:
    if isinstance(values, str):
        return RewardUse(name=values)
    if not isinstance(values.get("name"), str):
        raise ConfigError(f'{where}: found no name, expected one, e.g. {{ name = "math", weight = 0.5 }}')
    own = {one.name for one in fields(RewardUse)} - {"settings"}
    use: RewardUse = registry.convert({key: values[key] for key in values if key in own}, RewardUse, where=where)
    for key, uses in OF_ONE_USE.items():
        if key in values and use.use not in uses:
            raise ConfigError(f"{where}.{key}: means nothing for use = {use.use!r}, only for {' or '.join(uses)}")
    return RewardUse(
        **{name: getattr(use, name) for name in own}, settings={key: values[key] for key in values if key not in own}
    )
