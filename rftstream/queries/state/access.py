"""Compares the rights that the users of a run need with the rights on the servers of its log."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftstream.config import loader, log_users
from rftstream.config.sections import RunConfig
from rftstream.errors import ConfigError
from rftstream.queries.formatting import columns, plural
from rftstream.queries.plain import pick
from rftstream.runs.access import grants_of, principals
from rftstream.runs.folder import (
    RunFolder,
    candidates_here,
    find_run,
    lies_in_folder,
    next_folder,
    open_transport,
)
from rftstream.transport.access import AccessRights, Grant, Resource


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessDifference:
    """The difference between the rights on the servers and the needed rights."""

    missing: tuple[Grant, ...]
    """Needed rights that are not there."""
    superfluous: tuple[Grant, ...]
    """Rights for names of this run that are not needed, for instance because somebody added them by hand."""
    others: tuple[str, ...]
    """Rules that cover more than this run, or that deny something. `topics acls` never changes them."""
    added: bool = False
    """Whether the missing rights were just added."""
    removed: bool = False
    """Whether the superfluous rights were just removed."""

    @property
    def fine(self) -> bool:
        """Return whether every user has the needed rights."""
        return self.added or not self.missing

    def to_lines(self) -> list[str]:
        """Return the difference as lines for people."""
        lines = [
            f"{'added' if self.added else 'missing'}: {plural(len(self.missing), 'right')}",
            *(f"  + {_sentence(grant)}" for grant in self.missing),
        ]
        if self.superfluous:
            what = "removed" if self.removed else "not needed (--prune removes them)"
            lines += [f"{what}: {plural(len(self.superfluous), 'right')}"]
            lines += [f"  - {_sentence(grant)}" for grant in self.superfluous]
        if self.others:
            lines += ["rules of others, left as they are:", *(f"  {text}" for text in self.others)]
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return the difference as a dict for JSON."""
        missing, superfluous = (list(map(_grant_json, some)) for some in (self.missing, self.superfluous))
        return {**pick(self, "fine others added removed"), "missing": missing, "superfluous": superfluous}


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessReport:
    """The users of a run, with the rights that each needs. `needed_access` makes it."""

    run: str
    kind: str
    """Kind of the transport."""
    servers: str | None
    users: Mapping[str, str]
    """Kind of user -> its name on the servers, `User:NAME`."""
    grants: Mapping[str, tuple[Grant, ...]]
    """Kind of user -> the rights that it needs."""

    def all_grants(self) -> set[Grant]:
        """Return the rights of all users. Several kinds may share one user."""
        return {grant for grants in self.grants.values() for grant in grants}

    def to_json(self) -> dict[str, Any]:
        """Return the report as a dict for JSON."""
        users = [
            {"role": kind, "principal": self.users[kind], "rights": [_rule_json(rule) for rule in _rules(grants)]}
            for kind, grants in self.grants.items()
        ]
        return {"run": self.run, "transport": self.kind, "users": users}

    def to_text(self) -> str:
        """Return the report as text for people."""
        lines = [f"rights of the users of {self.run}"]
        for kind, grants in self.grants.items():
            rows = [
                (rule[1].value, f"{rule[2]}{'*' if rule[3] else ''}", ", ".join(rule[4])) for rule in _rules(grants)
            ]
            lines += ["", f"{kind}: {self.users[kind]}", *columns(rows, left=3, indent="  ")]
        return "\n".join(lines)

    def to_commands(self) -> str:
        """Return the `kafka-acls` commands that give these rights."""
        return "\n".join(_commands(self.all_grants(), self.servers or "HOST:9092"))


_Rule = tuple[str, Resource, str, bool, tuple[str, ...]]
"""User, resource, name, whether it is a prefix, operations."""


def _rules(grants: Iterable[Grant]) -> list[_Rule]:
    """Merge the operations of each user on each resource."""
    operations: defaultdict[tuple[str, Resource, str, bool], list[str]] = defaultdict(list)
    for grant in sorted(grants):
        operations[grant[:4]].append(grant.operation.value)
    return [(*key, tuple(found)) for key, found in operations.items()]


def _commands(grants: Iterable[Grant], servers: str) -> Iterator[str]:
    """Yield one command for each set of resources of one type on which a user has the same rights."""
    names: defaultdict[tuple[str, Resource, bool, tuple[str, ...]], list[str]] = defaultdict(list)
    for principal, resource, name, prefixed, operations in _rules(grants):
        names[principal, resource, prefixed, operations].append(name)
    for (principal, resource, prefixed, operations), found in names.items():
        words = ["kafka-acls", "--bootstrap-server", servers, "--command-config", "admin.properties", "--add"]
        words += ["--allow-principal", principal]
        words += [word for operation in operations for word in ("--operation", operation)]
        if resource is Resource.cluster:
            words.append("--cluster")
        else:
            words += [word for name in found for word in (f"--{resource.value}", name)]
            words += ["--resource-pattern-type", "prefixed" if prefixed else "literal"]
        yield shlex.join(words)


def find_named(path: Path, run_id: str | None = None, layers: Sequence[Path] = ()) -> tuple[RunConfig, RunFolder]:
    """Return the run with this id, or else the run that `path` names: a run folder, or a run file (its newest run here,
    or the one that it would start). No server is asked, since nobody may have rights yet."""
    if path.is_dir() or not path.exists():
        folder, config = find_run(path, layers)
    else:
        config = loader.load([path, *layers])
        existing = candidates_here(config)
        folder = existing[-1] if existing else next_folder(config, None)
    return config, folder if run_id is None else RunFolder(folder.path.with_name(run_id))


def needed_access(
    config: RunConfig, folder: RunFolder, *, prefix: str | None = None, named: Mapping[str, str] | None = None
) -> AccessReport:
    """Return the rights that the users of a run need. No server is asked. `prefix` and `named` give the users' names,
    as in `principals`."""
    users = principals(config, prefix=prefix, named=named)
    return AccessReport(
        run=folder.run_id,
        kind=config.transport.kind,
        servers=config.transport.servers,
        users=users,
        grants={kind: tuple(grants_of(kind, user, config, folder.run_id)) for kind, user in users.items()},
    )


def compare_access(report: AccessReport, config: RunConfig, folder: RunFolder) -> AccessDifference:
    """Compare the needed rights with those on the servers. ConfigError if the servers have no rights."""
    with _opened(config, folder) as rights:
        return _difference(report, rights)


def apply_access(
    report: AccessReport, config: RunConfig, folder: RunFolder, *, prune: bool = False
) -> AccessDifference:
    """Add the missing rights, and with `prune` remove superfluous ones. Return the difference from before.

    Rights are added before others are removed, so that a working role loses none in between.
    """
    with _opened(config, folder) as rights:
        before = _difference(report, rights)
        rights.add(before.missing)
        if prune:
            rights.remove(before.superfluous)
        return AccessDifference(
            missing=before.missing,
            superfluous=before.superfluous,
            others=before.others,
            added=True,
            removed=prune,
        )


def _difference(report: AccessReport, rights: AccessRights) -> AccessDifference:
    there, others = rights.grants()
    needed = report.all_grants()
    mine = {grant for grant in there if grant.resource is not Resource.cluster}  # the cluster is shared with others
    return AccessDifference(
        missing=tuple(sorted(needed - there)),
        superfluous=tuple(sorted(mine - needed)),
        others=tuple(others),
    )


@contextmanager
def _opened(config: RunConfig, folder: RunFolder) -> Iterator[AccessRights]:
    """Open the log as the admin. ConfigError for a log without servers, before it would be created."""
    if not lies_in_folder(config):
        with closing(open_transport(config, folder, create=True, user=log_users.ADMIN)) as transport:
            rights: AccessRights | None = getattr(transport.admin, "access", None)
            if rights is not None:
                yield rights
                return
    raise ConfigError(
        f"transport.kind: {config.transport.kind!r} has no users, expected a log on servers, kind 'kafka'"
    )


def _sentence(grant: Grant) -> str:
    kind = "prefixed " if grant.prefixed else ""
    return f"{grant.principal}: {grant.operation} on the {grant.resource} {kind}{grant.name}"


def _grant_json(grant: Grant) -> dict[str, Any]:
    pattern = "prefixed" if grant.prefixed else "literal"
    return {**pick(grant, "principal resource name operation"), "pattern": pattern}


def _rule_json(rule: _Rule) -> dict[str, Any]:
    _, resource, name, prefixed, operations = rule
    pattern = "prefixed" if prefixed else "literal"
    return {"resource": resource.value, "name": name, "pattern": pattern, "operations": list(operations)}
