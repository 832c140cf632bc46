"""A run file's evaluations on a model folder, without a run: the evaluator over a log in memory.

The model becomes version 0, published as by a trainer. So a folder from a run (`final/`, an export) gets the same
numbers that the run's own evaluator gave to that version. With a folder for results, each result is saved there at
once, and a saved result for the same model and settings is not computed again.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftstream.clock import SystemClock
from rftstream.config import loader
from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import PolicySpec
from rftstream.config.sections import RunConfig
from rftstream.contracts import codec
from rftstream.contracts.control import RunFinished
from rftstream.contracts.messages import Message
from rftstream.contracts.versions import EvalResult, WeightsAnnounced
from rftstream.data.tasksets.open import open_taskset
from rftstream.errors import ConfigError, RftError
from rftstream.launch.sessions.evaluation import chosen_evaluations, progress_of
from rftstream.models.folders.files import read_json
from rftstream.models.folders.folder import FAKE, for_section, model_digests, prepare_model, template_digest
from rftstream.models.spec import ModelSpec
from rftstream.preflight.trial_run import VERSION_0, claim_of_version_0, publish_version_0
from rftstream.roles.evaluator import EVALUATOR
from rftstream.runs.folder import RunFolder, create_log
from rftstream.runs.manifest import make_manifest
from rftstream.runs.services import Say, build_service, drive, role_context
from rftstream.runs.writes.additions import commit_once
from rftstream.service.reading import begin_positions
from rftstream.transport.base import Transport
from rftstream.transport.memory.transport import MemoryLog
from rftstream.weights.stores.store import ObjectStore

RESULTS = "results.json"
LOCK = ".results.lock"
"""Held while a result is added."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The result of one evaluation of a model. `evaluate_model` makes it."""

    model: str
    """The model, as named by the caller."""
    result: EvalResult
    """The result. Its `generations` are a path, or None if nothing is saved."""
    settings: str
    """Digest of the model and of everything that the result depends on."""
    new: bool
    """False if the result was already saved."""


def evaluate_model(
    config: RunConfig,
    model: str,
    *,
    evaluation: str | None = None,
    out: Path | None = None,
    again: bool = False,
    say: Say = lambda text: None,
) -> Generator[Scored]:
    """Yield results as they come, saved ones from `out` first. `model` is a folder, or a name on the hub.

    Own modules must be importable by now (preflight.plan). Close the iterator to end the processes of the rewards.
    """
    names = chosen_evaluations(config, evaluation, who=config.run.name)
    config = _config_for(config, model, names)
    spec = prepare_model(config.model, Path(), config.run.seed)
    kept = _Kept(out) if out is not None else None
    settings = {name: _settings(config, name, spec) for name in names}
    found = {} if again or kept is None else {name: kept.find(settings[name]) for name in names}
    for name, result in found.items():
        if result is not None:
            yield Scored(model, result, settings[name], new=False)
    left = {name: section for name, section in config.evaluations.items() if found.get(name) is None}
    if not left:
        return
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="rftstream-evaluate-"))
        folder = RunFolder(Path(scratch) / config.run.name)
        store = ObjectStore("file://weights", base=folder.path)
        for result in _evaluate(dataclasses.replace(config, evaluations=left), folder, store, say):
            del left[result.evaluation]
            one = Scored(model, result, settings[result.evaluation], new=True)
            if kept is None:
                yield dataclasses.replace(one, result=dataclasses.replace(result, generations=None))
            else:
                yield kept.keep(one, store)
    if left:
        raise RftError(f"{model}: no result for {', '.join(left)}: its weights could not be taken over; see above")


def _config_for(config: RunConfig, model: str, names: Sequence[str]) -> RunConfig:
    """Return the run file's config with this model and a log in memory."""
    policy = config.evaluator.policy or config.explorer.policy
    if not registry.spec(PolicySpec, policy, where="evaluator.policy").takes_weights:
        raise ConfigError(
            f"--model: the policy {policy!r} samples from what its server has, expected one that takes weights; "
            "give --set evaluator.policy=hf, or vllm"
        )
    if model == FAKE:
        raise ConfigError(f"--model: {FAKE!r} is no model, expected a Hugging Face model folder")
    path = str(Path(model).resolve()) if Path(model).is_dir() else model
    changed = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, path=path, make=None, init_from=None, lora=None),
        evaluations={name: config.evaluations[name] for name in names},
        trainer=dataclasses.replace(config.trainer, shares=1, keep_best=None),
        transport=dataclasses.replace(config.transport, kind="memory", partitions=1, servers=None, options={}),
    )
    return loader.from_dict(loader.to_dict(changed))


def _settings(config: RunConfig, name: str, spec: ModelSpec) -> str:
    """Return a digest of the data that the result depends on. The code of the user's modules is not included."""
    values = loader.to_dict(config)
    section = config.evaluations[name]
    asked = {key: value for key, value in values["evaluations"][name].items() if key != "every"}
    depends = {
        "model": model_digests(spec),
        "template": template_digest(for_section(spec, section)),
        "taskset": open_taskset(f"eval:{name}", section, config).digest,
        "evaluation": {"name": name, **asked},
        "policy": config.evaluator.policy or config.explorer.policy,
        "dtype": config.model.dtype,
        "context": config.model.context,
        "seed": config.run.seed,
        **{key: values.get(key) for key in ("sampling", "policies", "environments", "rewards")},
    }
    return f"sha256:{hashlib.sha256(json.dumps(depends, sort_keys=True, default=str).encode()).hexdigest()}"


def _evaluate(config: RunConfig, folder: RunFolder, store: ObjectStore, say: Say) -> Iterator[EvalResult]:
    clock = SystemClock()
    log = MemoryLog(clock.now)
    setup = log.connect("evaluate")
    create_log(setup, config)
    say("taking the model over")
    _put_version_0(setup, config, folder, publish_version_0(config, folder, store, clock.now()))
    reader, transport = setup.reader(begin_positions(setup, ("evals",))), log.connect(EVALUATOR.name)
    context = role_context(
        config=config,
        folder=folder,
        transport=transport,
        clock=clock,
        process="evaluate",
        own_store=store,
    )
    service = build_service(EVALUATOR.name, context)
    of_version = f" of version {VERSION_0.version}"
    with closing(drive(service, say, lambda service: progress_of(service).replace(of_version, ""))) as slices:
        for record in (record for _ in slices for record in reader.poll()):
            message = codec.from_record(record)
            assert isinstance(message, EvalResult)
            yield message


def _put_version_0(transport: Transport, config: RunConfig, folder: RunFolder, announced: WeightsAnnounced) -> None:
    """Write a run that is already over, with the model as its version 0."""
    tasksets = {f"taskset.{name}": "" for name in config.tasksets}
    messages: list[tuple[str, Message]] = [
        ("control", make_manifest(config, folder.run_id, tasksets, announced.announced_at)),
        ("control", claim_of_version_0()),
        ("weights", announced),
        ("control", RunFinished(reason="steps", name=VERSION_0, finished_at=announced.announced_at)),
    ]
    run, epoch = folder.run_id, VERSION_0.trainer_epoch
    records = (codec.to_record(one, topic, 0, run=run, writer_epoch=epoch) for topic, one in messages)
    commit_once(transport, "evaluate", records)


class _Kept:
    """A folder of results: `results.json`, and a file with the completions of each result."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {folder}: {error.strerror or error}, expected a folder to write to") from None

    def _rows(self) -> list[dict[str, Any]]:
        """Read the rows. They may have changed, since another evaluation may write into the same folder."""
        rows: list[dict[str, Any]] = read_json(self._folder / RESULTS).get("results", [])
        return rows

    def find(self, settings: str) -> EvalResult | None:
        for row in self._rows():
            if row.get("settings") == settings:
                fields = {item.name: row[item.name] for item in dataclasses.fields(EvalResult) if item.name in row}
                result: EvalResult = registry.convert(
                    {**fields, "name": {"trainer_epoch": 1, "version": 0}},
                    EvalResult,
                    where=str(self._folder / RESULTS),
                )
                return dataclasses.replace(result, generations=str(self._folder / str(result.generations)))
        return None

    def keep(self, one: Scored, store: ObjectStore) -> Scored:
        """Write the completions first and then the row, since a row implies that its completions are there."""
        assert one.result.generations is not None
        file = f"{one.result.evaluation}-{one.settings.partition(':')[2][:12]}.jsonl"
        _write(self._folder / file, store.get(one.result.generations))
        result = dataclasses.replace(one.result, generations=file)
        row = {"model": one.model, "settings": one.settings, **result_row(result)}
        with (self._folder / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            rows = [*(other for other in self._rows() if other.get("settings") != one.settings), row]
            _write(self._folder / RESULTS, (json.dumps({"results": rows}, indent=1) + "\n").encode())
        return dataclasses.replace(one, result=dataclasses.replace(result, generations=str(self._folder / file)))


def result_row(result: EvalResult) -> dict[str, Any]:
    """Return the row for a result that belongs to no run."""
    return {
        "evaluation": result.evaluation,
        "num_tasks": result.num_tasks,
        "num_samples": result.num_samples,
        "num_unscored": result.num_unscored,
        "metrics": dict(result.metrics),
        "generations": result.generations,
        "evaluated_at": result.evaluated_at,
    }


def _write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(data)
    partial.replace(path)
