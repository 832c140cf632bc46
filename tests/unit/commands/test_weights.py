"""`rftstream weights`: what is listed, verified and exported, over a run folder with an embedded log."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from safetensors.numpy import load_file

from rftstream.config import loader
from rftstream.contracts.versions import EvalResult, VersionName
from rftstream.models.folders import hub
from rftstream.models.folders.folder import prepare_model
from rftstream.models.folders.hub import HubPlace
from rftstream.queries.traces.lineage import parse_target
from rftstream.runs.folder import RunFolder, create_log
from rftstream.runs.published import numbers
from rftstream.testing.played import played_records
from rftstream.transport.embedded.transport import EmbeddedTransport
from rftstream.weights.publisher import WeightsPublisher
from rftstream.weights.snapshot import RawTensor, decode_snapshot
from rftstream.weights.stores.store import ObjectStore
from rftstream.weights.version_parts import FOLDER, parse_object_name
from tests import commands
from tests.part_writers import PartWriters

CONFIG = {
    "run": {"name": "demo", "steps": 9},
    "model": {"make": {"characters": "0123456789+= ", "layers": 1, "width": 32, "heads": 2}, "dtype": "float32"},
    "tasksets": {"sums": {"source": "arithmetic"}},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return made(tmp_path)


def made(tmp_path: Path, *, in_parts: bool = False) -> Path:
    """Versions 0 to 6 with an anchor every third one; 1 and 2 were given up."""
    folder = RunFolder(tmp_path / "demo")
    folder.path.mkdir(parents=True)
    config = loader.from_dict(CONFIG)
    spec = prepare_model(config.model, folder.model, 0)
    tensors = decode_snapshot((spec.folder / "model.safetensors").read_bytes())
    transport = EmbeddedTransport(folder.log)
    create_log(transport, config)
    producer = transport.producer("trainer")
    producer.start()
    store = ObjectStore("file://weights", base=folder.path)
    writer = PartWriters(store, model=spec.name) if in_parts else None
    publisher = WeightsPublisher(store, spec.name, "float32", anchor_every=3, writer=writer)
    gone = tuple(VersionName(trainer_epoch=1, version=version) for version in (1, 2))
    for version in range(7):
        name = VersionName(trainer_epoch=1, version=version)
        told = publisher.publish(tensors, name, resumed=version == 0, announced_at=1.7e9 + version)
        told = replace(told, gone=gone if version == 6 else ())
        producer.commit(played_records(transport, "demo", [("weights", 0, told)]))
        changed = {}
        for name, one in tensors.items():
            values = np.frombuffer(one.data, np.float32).copy()
            values[version :: max(len(values) // 8, 1)] += 0.25
            changed[name] = RawTensor(one.dtype, one.shape, values.data)
        tensors = changed
    for one in store.list(FOLDER):
        if parse_object_name(one) in gone:
            store.delete(one)
    transport.close()
    folder.config_file.write_text(loader.to_toml(config))
    return folder.path


def test_list(run: Path) -> None:
    lines = commands.called("weights", "list", run, "--all")
    assert [(one["version"], one["kind"], one["state"]) for one in lines] == [
        (0, "anchor", "kept"), (1, "delta", "deleted"), (2, "delta", "deleted"), (3, "anchor", "kept"),
        (4, "delta", "kept"), (5, "delta", "kept"), (6, "anchor", "kept"),
    ]  # fmt: skip
    assert [one["parent"] for one in lines] == [None, 0, 1, 2, 3, 4, 5]
    assert all(one["delta_bytes"] < lines[0]["num_bytes"] / 10 for one in lines[1:])
    assert commands.called("weights", "list", run) == [one for one in lines if one["state"] != "deleted"]
    text = commands.call("weights", "list", run).stdout
    assert "2 more are deleted: --all" in text
    assert "anchor" in text
    (run / "weights" / lines[4]["object"]).unlink()
    assert [one["state"] for one in commands.called("weights", "list", run)] == ["kept"] * 2 + ["missing"] * 2 + [
        "kept"
    ]


@pytest.mark.slow
def test_versions_in_parts_are_listed_verified_and_exported(tmp_path: Path) -> None:
    whole, run = made(tmp_path / "one"), made(tmp_path / "two", in_parts=True)
    first, second = (commands.called("weights", "list", one, "--all") for one in (whole, run))
    assert [{**one, "num_bytes": 0, "delta_bytes": 0, "object": one["object"].split(".")[0]} for one in first] == [
        {**one, "num_bytes": 0, "delta_bytes": 0} for one in second
    ]
    assert all(
        one["num_bytes"] < two["num_bytes"] < 2 * one["num_bytes"] for one, two in zip(first, second, strict=True)
    )
    assert commands.call("weights", "verify", run).stdout == "5 of 5 versions are good, bit for bit\n"
    tensors = []
    for one in (whole, run):
        assert commands.call("weights", "export", one, "--version", "5").exit_code == 0
        tensors.append(load_file(one / "exports" / "v5" / "model.safetensors"))
    assert tensors[0].keys() == tensors[1].keys()
    assert all(np.array_equal(value, tensors[1][name]) for name, value in tensors[0].items())
    assert parse_target(second[4]["object"]) == parse_target("1/4"), "as trace takes it"
    (run / "weights" / "versions" / "000001-00000004.0001.delta").unlink()
    assert [one["state"] for one in commands.called("weights", "list", run)][2:4] == ["missing"] * 2


def test_verify(run: Path) -> None:
    done = commands.call("weights", "verify", run)
    assert (done.exit_code, done.stdout) == (0, "5 of 5 versions are good, bit for bit\n")
    path = run / "weights" / "versions" / "000001-00000004.delta"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    done = commands.call("weights", "verify", run)
    assert done.exit_code == 1
    assert "version 4: weights 1/4 (versions/000001-00000004.delta): digest sha256:" in done.stdout
    assert done.stdout.endswith("3 of 5 versions are good\n"), "5 is made from 4, 6 is an anchor"
    told = [json.loads(line) for line in commands.call("weights", "verify", run, "--json").stdout.splitlines()]
    assert [one["version"] for one in told if not one["good"]] == [4, 5]


def test_export(run: Path, tmp_path: Path) -> None:
    assert "is --to FOLDER" in commands.call("weights", "export", run, tmp_path / "mine").stderr
    done = commands.call("weights", "export", run)
    assert (done.exit_code, done.stdout) == (0, f"version 6 is in {run / 'exports' / 'v6'}\n")
    folder = run / "exports" / "v6"
    assert {path.name for path in folder.iterdir()} >= {"config.json", "tokenizer.json", "model.safetensors"}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    mine = load_file(folder / "model.safetensors")
    anchor = load_file(run / "weights" / "versions" / "000001-00000006.safetensors")
    assert all(np.array_equal(mine[name], anchor[name]) for name in mine.keys() | anchor.keys())

    done = commands.call(
        "weights", "export", run, "--version", "0", "--version", "5", "--to", tmp_path / "some", "--json"
    )
    assert done.exit_code == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(one["version"], one["folder"]) for one in told] == [
        (0, str(tmp_path / "some" / "v0")), (5, str(tmp_path / "some" / "v5")),
    ]  # fmt: skip
    done = commands.call("weights", "export", run, "--version", "3", "--version", "3", "--to", tmp_path / "twice")
    assert (done.exit_code, done.stdout) == (0, f"version 3 is in {tmp_path / 'twice'}\n")
    refused = commands.call("weights", "export", run)
    assert refused.exit_code == 2
    assert "exists already, expected a new folder" in refused.stderr
    refused = commands.call("weights", "export", run, "--version", "1")
    assert refused.exit_code == 2
    assert "--version 1: its weights are deleted; with weights in the store: 0, 3 to 6" in refused.stderr
    assert not [path for path in (run / "exports").iterdir() if path.name.startswith(".")]


def test_the_best_version_is_exported_by_its_evaluations(run: Path, tmp_path: Path) -> None:
    def ended(to: str) -> Result:
        return commands.call("weights", "export", run, "--version", "best", "--to", tmp_path / to)

    def evaluated(name: str, **means: float) -> None:
        results = [
            EvalResult(evaluation=name, name=VersionName(trainer_epoch=1, version=int(version[1:])), num_tasks=5,
                       num_samples=1, num_unscored=0, metrics={"mean": mean}, generations=None)
            for version, mean in means.items()
        ]  # fmt: skip
        with closing(EmbeddedTransport(RunFolder(run).log)) as transport:
            producer = transport.producer(name)
            producer.start()
            producer.commit(played_records(transport, "demo", [("evals", 0, one) for one in results]))

    refused = ended("none")
    assert (refused.exit_code, "no evaluation has a result" in refused.stderr) == (2, True)
    evaluated("equal", v0=0.5, v3=0.5)
    assert "no version is better than another by equal, expected the number" in ended("equal").stderr
    evaluated("sums", v0=0.25, v3=0.75, v5=0.5)
    assert ended("one").stdout == f"version 3 is in {tmp_path / 'one'}\n"
    evaluated("words", v0=0.25, v3=0.25, v5=0.5)
    refused = ended("two")
    assert refused.exit_code == 2
    assert "--version best: evaluations disagree (3 by sums; 5 by words), expected the number" in refused.stderr
    refused = commands.call("weights", "export", run, "--version", "bset")
    assert (refused.exit_code, "got 'bset', expected the number of a version, or best" in refused.stderr) == (2, True)


def test_export_to_a_hub(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[object, ...]] = []

    def upload(folder: Path, place: HubPlace, *, private: bool, message: str) -> str:
        assert (folder / "model.safetensors").is_file()
        sent.append((folder.name, place, private, message))
        return f"http://hub/{place.name}"

    monkeypatch.setenv("HF_TOKEN", "some")
    monkeypatch.setattr(hub, "upload", upload)
    done = commands.call("weights", "export", run, "--upload", "me/sums", "--to", tmp_path / "one")
    assert (done.exit_code, done.stdout) == (0, f"version 6 is in {tmp_path / 'one'}, and at http://hub/me/sums\n")
    done = commands.call(
        "weights", "export", run, "--version", 3, "--version", 4, "--upload", "me/sums", "--private", "--json"
    )
    assert [json.loads(line)["url"] for line in done.stdout.splitlines()] == ["http://hub/me/sums"] * 2
    assert sent == [
        ("one", HubPlace("me/sums", None), False, "version 6 of demo"),
        ("v3", HubPlace("me/sums", "v3"), True, "version 3 of demo"),
        ("v4", HubPlace("me/sums", "v4"), True, "version 4 of demo"),
    ]
    refused = commands.call("weights", "export", run, "--private")
    assert refused.exit_code == 2
    assert "--private is for what --upload makes" in refused.stderr
    assert not (run / "exports" / "v6").exists()


def test_numbers() -> None:
    assert numbers([]) == "none"
    assert numbers([5, 0, 1, 3, 4, 9, 9]) == "0, 1, 3 to 5, 9"
