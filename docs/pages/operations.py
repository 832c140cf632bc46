"""docs/operations.md: exit codes from errors.py. docs/kafka.md: rights from the declarations of the roles, and what
brokers should be. docs/monitoring.md: metrics from metrics.py and queries/curves/exported.py, dashboards from
deploy/grafana."""

from __future__ import annotations

import json
from pathlib import Path

from pages.markdown import table
from rftstream import errors
from rftstream import metrics as declared
from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.contracts.topics import TOPICS
from rftstream.queries.curves.exported import EXPORTED
from rftstream.queries.state.topics_plan import plan_topics
from rftstream.runs.access import rights_of, user_kinds
from rftstream.runs.folder import RunFolder
from rftstream.transport.access import Operation, Resource

DASHBOARDS = Path(__file__).parents[2] / "deploy" / "grafana" / "dashboards"
A_RUN_FILE = Path(__file__).parents[2] / "examples" / "arithmetic.toml"
LETTERS = {Operation.read: "R", Operation.write: "W", Operation.delete: "D", Operation.create: "C"}

MEANINGS = {
    0: ("done, or stopped as asked", "left alone; a single role that leaves before the end is started again"),
    1: ("failed by what may pass", "started again, with a growing pause"),
    2: (
        "configuration or usage: a run file, a command line, a resume with other data, or what is not here (a GPU, "
        "weights, keys, a package, rights)",
        "ends the run",
    ),
    3: (
        "the log cannot be reached, or refuses, for longer than `transport.patience_s`, or the object store for longer "
        "than `weights.patience_s`",
        "ends the run",
    ),
    4: (
        "a contract is broken: bytes that are not what they claim to be",
        "ends the run",
    ),
    5: ("another process took the role over", "left alone while that one lives"),
    6: ("stopped by a rule of the run itself", "ends the run"),
    7: (
        "the log has lost what the run needs, and no resume goes on: begin a new run, as the error says",
        "ends the run",
    ),
}
"""Code -> what it means, and what `run` does when a worker ends with it."""


def exit_codes() -> str:
    classes: dict[int, list[str]] = {}
    for name, one in vars(errors).items():
        if isinstance(one, type) and issubclass(one, errors.RftError) and one is not errors.RftError:
            classes.setdefault(one.exit_code, []).append(f"`{name}`")
    rows = [(str(code), what, ", ".join(classes.get(code, ())), does) for code, (what, does) in MEANINGS.items()]
    assert set(classes) <= set(MEANINGS), "every code has its meaning"
    return table(("code", "meaning", "errors", "`run` does"), rows)


def metrics() -> str:
    rows = []
    for metric in declared.REGISTRY.collect():
        if metric.name.startswith("process_"):  # the client's own, the same for every program
            continue
        labels = next(one._labelnames for one in vars(declared).values() if getattr(one, "_name", None) == metric.name)
        if metric.type == "info":  # its labels come with the values that a worker gives it
            labels = ("version", "python")
        name = metric.name + {"counter": "_total", "info": "_info"}.get(metric.type, "")
        rows.append((f"`{name}`", metric.type, ", ".join(labels) or "-", metric.documentation))
    return table(("metric", "type", "labels", "meaning"), rows)


def run_metrics() -> str:
    rows = [(f"`{one.name}`", one.kind, ", ".join(one.labels), one.help) for one in EXPORTED]
    return table(("metric", "type", "labels", "meaning"), rows)


def dashboards() -> str:
    found = [json.loads(path.read_text(encoding="utf-8")) for path in DASHBOARDS.glob("*.json")]
    rows = [(f"`{one['title'].removeprefix('rftstream: ')}`", one["description"]) for one in found]
    return table(("dashboard", "what it answers"), sorted(rows, key=lambda row: (row[0] != "`overview`", row[0])))


def broker_wishes() -> str:
    config = loader.load([A_RUN_FILE], sets=["transport.kind=kafka", "transport.servers=HOST:9092"], env={})
    wishes = plan_topics(config, RunFolder(Path("run"))).brokers
    return table(("brokers", "wanted", "else"), [(f"`{one.name}`", one.wanted, one.why) for one in wishes])


def rights() -> str:
    """Users beside topics, groups and transactional ids."""
    config = loader.load([A_RUN_FILE], env={})
    kinds = user_kinds()
    rows = [(f"`{topic}`", *(_letters(kind, topic, config) for kind in kinds)) for topic in sorted(TOPICS)]
    rows += [
        (what, *(_named(kind, resource, config) for kind in kinds))
        for what, resource in (("groups", Resource.group), ("transactional ids", Resource.transactional_id))
    ]
    return table(("", *kinds), rows)


def _letters(kind: str, topic: str, config: RunConfig) -> str:
    allowed = {
        operation
        for right in rights_of(kind, config)
        if right.resource is Resource.topic and (right.name == topic or (right.prefixed and right.name == ""))
        for operation in right.operations
    }
    return "".join(letter for operation, letter in LETTERS.items() if operation in allowed)


def _named(kind: str, resource: Resource, config: RunConfig) -> str:
    """Which names may be used, beyond being described."""
    found = [
        ("all" if right.name == "" else "its own") + (": " + "".join(LETTERS.get(one, "") for one in right.operations))
        for right in rights_of(kind, config)
        if right.resource is resource and any(one in LETTERS for one in right.operations)
    ]
    return ", ".join(found)
