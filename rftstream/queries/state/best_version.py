"""The best version of a run by its evaluations: where its weights are, and the commands that take it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rftstream.errors import ConfigError, RftError
from rftstream.queries.curves.evaluations import newest_and_best, without_best
from rftstream.queries.curves.history import History, read_glance
from rftstream.queries.formatting import number
from rftstream.queries.plain import Report
from rftstream.runs.folder import OpenRun, shown_path, store_place
from rftstream.runs.published import read_published
from rftstream.service.role import Log


@dataclass(frozen=True, slots=True, kw_only=True)
class BestVersion(Report):
    """A version that is the best by an evaluation. `find_best` makes it; `status` names it."""

    JSON = "version means weights export evaluate"

    version: int
    means: Mapping[str, float | None]
    """Evaluation by which it is the best -> its mean."""
    weights: str | None
    """Object with its weights, or a model folder. None: they are deleted, or none of this version were published."""
    export: str
    """Command that makes a model folder of it."""
    evaluate: str
    """Command that evaluates it again."""

    def to_text(self) -> str:
        """Return the version, its means and what can be done with it."""
        means = ", ".join(f"{name} {number(mean)}" for name, mean in self.means.items())
        if self.weights is None:
            return (
                f"version {self.version:,} ({means}), whose weights are deleted: weights.keep holds more versions, "
                "trainer.keep_best the checkpoint of the best"
            )
        return f"version {self.version:,} ({means}) in {self.weights}: `{self.export}`, `{self.evaluate}`"


def find_best(run: OpenRun, history: History) -> tuple[BestVersion, ...]:
    """Return the best version of each evaluation that knows one, a version of several once, in order of versions. The
    store is not asked: the log says which weights were deleted."""
    means: dict[int, dict[str, float | None]] = {}
    equal = without_best(history.evaluations)
    for name, (_, best) in newest_and_best(history.evaluations).items():
        if name in equal or "canary" in best.metrics:  # who earns nothing there need not have learned anything
            continue
        means.setdefault(best.name.version, {})[name] = best.metrics.get("mean")
    places = _places(run, history) if means else {}
    path = shown_path(run.folder.path) if run.folder.exists() else "RUN"
    return tuple(
        BestVersion(
            version=version,
            means=means[version],
            weights=places.get(version),
            export=f"rftstream weights export {path} --version {version}",
            evaluate=f"rftstream evaluate {path} --version {version} --again",
        )
        for version in sorted(means)
    )


def best_number(run: OpenRun) -> int:
    """Return the number of the best version. ConfigError if no evaluation has a result, if evaluations disagree, or if
    no version is better than another."""
    history = read_glance(Log(run.transport))
    found = find_best(run, history)
    if len(found) == 1:
        return found[0].version
    named = "; ".join(f"{one.version} by {', '.join(one.means)}" for one in found)
    equal = ", ".join(without_best(history.evaluations))
    none = f"no version is better than another by {equal}" if equal else "no evaluation has a result"
    raise ConfigError(
        f"--version best: {f'evaluations disagree ({named})' if named else none}, expected the number of a version; "
        "`rftstream weights list RUN` shows them"
    )


def _places(run: OpenRun, history: History) -> dict[int, str]:
    """Return version -> the place of its weights."""
    places: dict[int, str] = {}
    try:
        published = read_published(run)
    except RftError:  # nothing was published, or this user may not read it
        return places
    store = store_place(run.config, run.folder)
    for one in published.follower.in_force():
        if one.name not in published.gone:
            places[one.name.version] = f"{store}/{one.object}"
    if run.folder.final.is_dir():
        places[history.version] = shown_path(run.folder.final)
    return places
