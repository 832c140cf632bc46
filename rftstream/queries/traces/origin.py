"""Where the records of a run come from, if it is made of another one: `rescore`, `replay --into`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rftstream.config.sections import RunConfig
from rftstream.contracts.control import RunManifest
from rftstream.queries.plain import Report
from rftstream.queries.traces.lineage import Node
from rftstream.runs.folder import OpenRun
from rftstream.service.control_view import read_control


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin(Report):
    """Where the records of a run come from. `origin_of` makes it."""

    run: str
    """Folder of the other run."""
    versions: tuple[int, int] | None
    """Its batches between them are trained here; None: its rollouts were scored again."""
    changed: tuple[str, ...]
    """`key before -> after` for each setting in which this run differs from it."""

    @property
    def name(self) -> str:
        """Return the name of the other run."""
        return Path(self.run).name

    @property
    def how(self) -> str:
        """Return how its records are used here, in words."""
        if self.versions is None:
            return "its rollouts, scored again"
        return f"its batches from version {self.versions[0]} to {self.versions[1]}"


def origin_of(config: RunConfig, manifest: RunManifest | None) -> Origin | None:
    """Return where the run's records come from; None if the run has sampled its rollouts itself."""
    if config.run.imported_from is None:
        return None
    return Origin(
        run=config.run.imported_from,
        versions=config.run.imported_versions,
        changed=() if manifest is None else manifest.changed,
    )


def origin_node(run: OpenRun) -> list[Node]:
    """For a trace; empty for a run that has sampled its rollouts itself."""
    origin = origin_of(run.config, read_control(run.transport).manifest)
    if origin is None:
        return []
    facts = {"is": origin.how, "changed": "; ".join(origin.changed) or None}
    return [Node(kind="made of", name=origin.run, facts=facts)]
