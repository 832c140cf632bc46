"""`experts.source = "run:NAME"`: takes rollouts of another run as demonstrations, or as pairs."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from rftstream.config.sections import DemonstrationsSection, RunConfig
from rftstream.errors import ConfigError
from rftstream.queries.catalog.run_index import RunIndex
from rftstream.queries.datasets.choosing import Conditions, export_rollouts
from rftstream.runs.folder import open_run
from rftstream.runs.writes.load_demonstrations import FROM_RUN, dataset_of


def take_rollouts(
    config: RunConfig, section: DemonstrationsSection | None, folder: Path, *, is_recorded: bool = True
) -> None:
    """Write a data set below `folder` for each source that is a run, once. Do nothing without such sources.

    The other run's log gets to know of it, if `is_recorded`. ConfigError if there is no such run, or if no rollout of
    it meets the conditions in `section.options`."""
    for source in () if section is None else section.sources:
        if not source.startswith(FROM_RUN):
            continue
        assert section is not None, "it has a source"
        dataset, name = dataset_of(folder, source, section), source.removeprefix(FROM_RUN)
        wanted = Conditions.of(section.options, where="experts.options")
        if wanted.form == "parquet":
            raise ConfigError("experts.options.form: got 'parquet', expected one that is learned from: sft or pairs")
        if dataset.exists():
            continue
        dataset.parent.mkdir(parents=True, exist_ok=True)
        with closing(RunIndex(open_run(_path_of(config, name)))) as index:
            export_rollouts(index, wanted, dataset, is_recorded=is_recorded)


def _path_of(config: RunConfig, name: str) -> Path:
    """Return the run folder or run file: relative to the run file or to the current folder, or a name of a run."""
    base = Path(config.base)
    places = [base / name, Path(name), base / config.run.folder / name]
    found = next((place for place in places if name and place.exists()), None)
    if found is None:
        raise ConfigError(
            f"experts.source: run:{name}: no such run, expected a run folder, a run file, or the name of a run in "
            f"{base / config.run.folder}"
        )
    return found
