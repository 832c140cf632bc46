"""Data sets that were exported, found again on the log by their digest or their folder."""

from __future__ import annotations

import re
from pathlib import Path

from rftstream.contracts.control import DatasetExported
from rftstream.errors import ConfigError
from rftstream.queries.datasets.writing import said_of
from rftstream.queries.formatting import moment
from rftstream.queries.traces.lineage import FORMS, Node
from rftstream.runs.folder import OpenRun
from rftstream.service.control_view import read_control


def find_exports(run: OpenRun, name: str, *, forms: str = "") -> list[DatasetExported]:
    """Return the data sets with this digest, or in this folder, oldest first: a folder that was moved is known by the
    digest on its card. ConfigError if there is none; `forms`: what else the name could have been."""
    exports = read_control(run.transport).exports
    folder = str(Path(name).absolute())
    digests = re.findall(r"sha256:[0-9a-f]+", name) or _digests_on(Path(name) / "README.md")
    found = [one for one in exports if any(one.digest.startswith(digest) for digest in digests)]
    found = found or [one for one in exports if one.folder == folder]
    if not found:
        known = ", ".join(f"{one.folder} ({one.digest[:15]})" for one in exports[-5:]) or "none yet"
        raise ConfigError(
            f"{name}: no data set of this digest or folder left the run {run.run_id}, expected one of: {known}{forms}"
        )
    return found


def _digests_on(card: Path) -> list[str]:
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    return re.findall(r"Digest of the rows: `(sha256:[0-9a-f]{64})`", text)


def export_node(run: OpenRun, name: str) -> Node:
    """Return the trace of a data set: who took which rollouts, and when."""
    nodes = [
        Node(
            "export",
            one.digest,
            facts={
                "is": f"{one.num_rows:,} rows ({one.form}) of rollouts with: {said_of(one.filters)}",
                "by": f"{one.by} {moment(one.exported_at)}",
                "folder": one.folder,
            },
        )
        for one in find_exports(run, name, forms=f"; or {FORMS}")
    ]
    return nodes[0] if len(nodes) == 1 else Node("exports", name, children=nodes)
