"""A run's published versions, read from its log and store, during the run or after it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rftstream.algorithms.requirements import trained_spec
from rftstream.contracts.versions import VersionName, WeightsAnnounced
from rftstream.errors import ConfigError, WeightsError
from rftstream.models.folders.folder import copy_companions, prepare_model
from rftstream.models.spec import ModelSpec
from rftstream.runs.folder import OpenRun
from rftstream.service.role import Log
from rftstream.weights.adapters import whole_tensors, write_adapter
from rftstream.weights.follower import WeightsFollower
from rftstream.weights.snapshot import RawTensor, write_snapshot


@dataclass(frozen=True, slots=True)
class Published:
    """A run's published versions. `read_published` makes it; callers choose versions and fetch their weights."""

    follower: WeightsFollower
    """A follower that knows all announcements."""
    gone: frozenset[VersionName]
    """Versions that were given up, whether or not their objects still exist."""

    def choose(self, versions: Sequence[int], *, where: str) -> list[WeightsAnnounced]:
        """Return the versions in force with these numbers, or the newest available one if `versions` is empty.
        ConfigError for a version whose weights can no longer be made."""
        available = {one.name.version: one for one in self.follower.available()}
        if not available:
            raise ConfigError(f"{where}: the store has no version (any more); a run keeps some (weights.keep)")
        if not versions:
            return [list(available.values())[-1]]
        for version in versions:
            if version not in available:
                known = any(one.name.version == version for one in self.follower.in_force())
                raise ConfigError(
                    f"{where} {version}: {'its weights are deleted' if known else 'no such version'}; with weights in "
                    f"the store: {numbers(list(available))} (weights.keep says how many stay)"
                )
        return [available[version] for version in versions]


def read_published(opened: OpenRun) -> Published:
    """Read the announcements of a run. ConfigError if nothing was published yet."""
    found = [message.message for message in Log(opened.transport).messages("weights")]
    announced = [one for one in found if isinstance(one, WeightsAnnounced)]
    if not announced:
        raise ConfigError(f"{opened.run_id}: no version yet; wait for its trainer")
    follower = WeightsFollower(opened.store(), announced[0].model)
    for one in announced:
        follower.announced(one)
    return Published(follower, frozenset(name for one in announced for name in one.gone))


def verify(published: Published) -> Iterator[tuple[WeightsAnnounced, str | None]]:
    """Read and compare each version in force that was not given up, oldest first. Yield it with its error, or None."""
    for one in published.follower.in_force():
        if one.name in published.gone:
            continue
        try:
            published.follower.fetch(one)
        except WeightsError as error:
            yield one, str(error)
        else:
            yield one, None


def model_of(opened: OpenRun) -> ModelSpec:
    """Return the run's model. ConfigError if it has no model folder to copy."""
    spec = trained_spec(opened.config, prepare_model(opened.config.model, opened.folder.model, opened.config.run.seed))
    if not (spec.folder / "config.json").is_file():
        raise ConfigError(f"{opened.run_id}: its model is {spec.name!r}, expected one with a folder")
    return spec


def whole_model(spec: ModelSpec, tensors: Mapping[str, RawTensor]) -> Mapping[str, RawTensor]:
    """Return all weights of a version. Adapters are merged into their model."""
    if spec.lora is None:
        return tensors
    from rftstream.policies.served import served_parameters

    return whole_tensors(spec, tensors, served_parameters(spec)[0], where=f"weights of {spec.name}")


def write_model_folder(
    published: Published,
    announced: WeightsAnnounced,
    spec: ModelSpec,
    target: Path,
    *,
    adapter: bool = False,
    describe: Callable[[Path, int], None] | None = None,
) -> None:
    """Write an ordinary Hugging Face folder of a version, as `final/` is: weights, config, tokenizer, template,
    generation config; or its adapter alone, in the form of PEFT. `describe` writes the version's model card into the
    full folder. The folder appears whole or not at all. ConfigError if the place is taken, or if the run has no
    adapters."""
    if adapter and spec.lora is None:
        raise ConfigError(f"--adapter: {spec.name} was trained as a whole, without [model.lora]; leave the option out")
    if target.exists():
        raise ConfigError(f"{target}: exists already, expected a new folder; remove it, or give another --to")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        tensors = published.follower.fetch(announced)
        if adapter:
            write_adapter(partial, spec, tensors)
        else:
            copy_companions(spec, partial)
            with (partial / "model.safetensors").open("wb") as file:
                write_snapshot(file, whole_model(spec, tensors), {"format": "pt"})
            if describe is not None:
                describe(partial, announced.name.version)
        partial.chmod(0o755)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def numbers(versions: Sequence[int]) -> str:
    """Return version numbers as text, like "0, 20 to 57"."""
    runs: list[list[int]] = []
    for version in sorted(set(versions)):
        if runs and runs[-1][1] == version - 1:
            runs[-1][1] = version
        else:
            runs.append([version, version])
    texts = [
        ", ".join(map(str, range(first, last + 1))) if last - first < 2 else f"{first} to {last}"
        for first, last in runs
    ]
    return ", ".join(texts) or "none"
