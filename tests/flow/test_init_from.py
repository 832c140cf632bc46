"""`model.init_from`: a run that begins with another one's weights, its tokenizer and its template."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from rftstream.backends.base import OptimizerSettings
from rftstream.backends.torch.backend import TorchBackend
from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.contracts.versions import VersionName
from rftstream.errors import ConfigError
from rftstream.models.folders.folder import initial_of, model_digests, prepare_model
from rftstream.preflight.checks.check import check
from rftstream.runs.folder import RunFolder, create_log, open_store
from rftstream.runs.making.init_from import fetch_initial
from rftstream.testing.played import played_records
from rftstream.transport.embedded.transport import EmbeddedTransport
from rftstream.weights.publisher import publish
from rftstream.weights.snapshot import RawTensor, state_digest

SOURCE = {
    "run": {"name": "first", "steps": 4},
    "model": {"make": {"layers": 1, "width": 16, "heads": 2}, "dtype": "float32"},
    "tasksets": {"sums": {"source": "arithmetic"}},
    "explorer": {"policy": "hf"},
    "transport": {"partitions": 1},
}


def source_run(folder: Path) -> tuple[RunFolder, dict[int, str]]:
    """A run with three versions, of which the store has lost the second; and their digests."""
    config = loader.from_dict({**SOURCE, "base": str(folder)})
    run = RunFolder(folder / "runs" / "first")
    spec = prepare_model(config.model, run.model, 0)
    transport = EmbeddedTransport(run.log)
    create_log(transport, config)
    producer = transport.producer("trainer")
    producer.start()
    store, digests = open_store(config, run), {}
    tensors = {name: value.copy() for name, value in load_file(run.model / "model.safetensors").items()}
    for version in range(3):
        for value in tensors.values():
            value += version
        raw = {name: RawTensor("F32", value.shape, value.tobytes()) for name, value in tensors.items()}
        announced = publish(store, raw, VersionName(trainer_epoch=1, version=version), spec.name, "float32",
                            resumed=not version)  # fmt: skip
        digests[version] = announced.weights_digest
        producer.commit(played_records(transport, "first", [("weights", 0, announced)]))
        if version == 1:
            store.delete(announced.object)
    producer.close()
    transport.close()
    run.config_file.write_text(loader.to_toml(config))
    return run, digests


def begun_from(folder: Path, init_from: str) -> RunConfig:
    return loader.from_dict(
        {**SOURCE, "run": {"name": "second", "steps": 1}, "model": {"init_from": init_from, "dtype": "float32"},
         "base": str(folder)}
    )  # fmt: skip


@pytest.mark.parametrize(("named", "version"), [("runs/first@0", 0), ("runs/first@2", 2), ("runs/first", 2)])
def test_it_begins_with_the_weights_of_the_version(tmp_path: Path, named: str, version: int) -> None:
    source, digests = source_run(tmp_path)
    config, folder = begun_from(tmp_path, named), tmp_path / "runs" / "second" / "model"
    fetch_initial(config, folder)
    spec = prepare_model(config.model, folder, 0)
    backend = TorchBackend(TorchBackend.Config(), model=spec, optimizer=OptimizerSettings(), seed=0)
    backend.open()
    assert state_digest(backend.served_tensors()) == digests[version]
    final = tmp_path / "final"
    final.mkdir()
    backend.export(final)
    backend.close()
    for name in ("tokenizer.json", "config.json"):
        assert (final / name).is_file(), "the companions come along"
    assert not (final / "initial.json").exists()
    origin = initial_of(folder)
    assert origin is not None
    assert (origin["run"], origin["version"], origin["weights_digest"]) == ("first", version, digests[version])
    before = prepare_model(loader.load([source.config_file], env={}).model, source.model, 0)
    assert (model_digests(spec)["model"] == model_digests(before)["model"]) is (version == 0)
    assert model_digests(spec)["tokenizer"] == model_digests(before)["tokenizer"]
    source.config_file.unlink()
    fetch_initial(config, folder)  # it is there, so the other run is not needed any more


@pytest.mark.parametrize(("named", "text"), [
    ("runs/first@1", "version 1: its weights are deleted; with weights in the store: 0, 2"),
    ("runs/first@7", "version 7: no such version; with weights in the store: 0, 2"),
    ("runs/none@1", "no such run"),
    ("runs/first@new", "expected RUN or RUN@version"),
])  # fmt: skip
def test_what_is_not_there_is_named(tmp_path: Path, named: str, text: str) -> None:
    source, _ = source_run(tmp_path)
    folder = tmp_path / "runs" / "second" / "model"
    with pytest.raises(ConfigError, match=r"model\.init_from: ") as refused:
        fetch_initial(begun_from(tmp_path, named), folder)
    assert text in str(refused.value)
    assert not folder.exists()
    told = check(begun_from(tmp_path, named)).errors
    assert [one for one in told if "init_from" in one] == told[:1], "once"
    shutil.rmtree(source.log)
    (only,) = check(begun_from(tmp_path, "runs/first@0")).errors
    assert "first" in only and "model.init_from" not in only, "the log is missing, whose error names no setting"


def test_a_run_keeps_what_it_began_with(tmp_path: Path) -> None:
    source_run(tmp_path)
    folder = tmp_path / "runs" / "second" / "model"
    with pytest.raises(ConfigError, match="are not here yet"):
        prepare_model(begun_from(tmp_path, "runs/first@0").model, folder, 0)
    fetch_initial(begun_from(tmp_path, "runs/first@0"), folder)
    with pytest.raises(ConfigError, match="holds the weights of runs/first@0, expected runs/first@2"):
        prepare_model(begun_from(tmp_path, "runs/first@2").model, folder, 0)


def test_one_origin_only() -> None:
    with pytest.raises(ConfigError, match="exactly one of path, init_from"):
        loader.from_dict({**SOURCE, "model": {"path": "fake", "init_from": "runs/first"}})
