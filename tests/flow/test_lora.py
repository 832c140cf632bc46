"""`[model.lora]`: adapters are published, followed, sampled with, exported, and begun from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file

from rftstream.algorithms.grpo import Grpo
from rftstream.backends.torch.backend import TorchBackend
from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.contracts.versions import VersionName, WeightsAnnounced, WeightsKind
from rftstream.errors import ConfigError
from rftstream.models.folders.folder import prepare_model
from rftstream.models.spec import ModelSpec
from rftstream.policies.served import served_parameters
from rftstream.runs.folder import RunFolder, create_log
from rftstream.runs.making.init_from import fetch_initial
from rftstream.runs.manifest import check_worker, make_manifest
from rftstream.testing.played import played_records
from rftstream.transport.embedded.transport import EmbeddedTransport
from rftstream.weights.adapters import whole_tensors, write_adapter
from rftstream.weights.follower import WeightsFollower
from rftstream.weights.publisher import WeightsPublisher
from rftstream.weights.snapshot import RawTensor, state_digest
from rftstream.weights.stores.store import ObjectStore
from tests import commands
from tests.unit import tiny

MODEL = {"make": {"width": 32}, "dtype": "bfloat16"}
RUN = {
    "run": {"name": "demo", "steps": 9},
    "model": {**MODEL, "lora": {"rank": 2, "targets": ["q_proj", "down_proj"]}},
    "tasksets": {"sums": {"source": "arithmetic"}},
}
NUM_VERSIONS = 4


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[tuple[RunFolder, ModelSpec, TorchBackend, list[WeightsAnnounced]]]:
    """A run folder with a few versions, an anchor every third one; and the backend that trained them."""
    folder = RunFolder(tmp_path / "demo")
    folder.path.mkdir()
    config = loader.from_dict(RUN)
    folder.config_file.write_text(loader.to_toml(config))
    spec = prepare_model(config.model, folder.model, 0)
    transport = EmbeddedTransport(folder.log)
    create_log(transport, config)
    producer = transport.producer("trainer")
    producer.start()
    publisher = WeightsPublisher(ObjectStore("file://weights", base=folder.path), spec.name, spec.dtype, anchor_every=3)
    backend, grpo, told = tiny.backend(spec), Grpo(Grpo.Config()), []
    for version in range(NUM_VERSIONS):
        name = VersionName(trainer_epoch=1, version=version)
        told.append(publisher.publish(backend.served_tensors(), name, resumed=version == 0))
        producer.commit(played_records(transport, "demo", [("weights", 0, told[-1])]))
        if version < NUM_VERSIONS - 1:
            backend.update(tiny.rows(seed=version), grpo, tiny.plan())
    producer.close()
    transport.close()
    yield folder, spec, backend, told
    backend.close()


def weights(tensors: dict[str, RawTensor]) -> dict[str, torch.Tensor]:
    return {name: torch.frombuffer(bytearray(one.data), dtype=torch.bfloat16) for name, one in tensors.items()}


@pytest.mark.law("lineage")
def test_a_follower_gets_the_adapters_bit_for_bit_and_the_policy_what_they_make(trained) -> None:
    folder, spec, backend, told = trained
    assert {one.kind for one in told} == {WeightsKind.full, WeightsKind.delta}
    assert all(one.model == spec.name for one in told)
    assert told[0].num_bytes < 20_000 < sum(one.numel() for one in backend._network.model.parameters())
    follower = WeightsFollower(ObjectStore("file://weights", base=folder.path), spec.name)
    policy = tiny.policy(spec)
    for one in told:
        assert follower.announced(one)
        policy.load(follower.fetch(one), one.name)
    tensors = dict(follower.fetch(told[-1]))
    assert state_digest(tensors) == told[-1].weights_digest == state_digest(backend.served_tensors())
    expected = whole_tensors(spec, tensors, served_parameters(spec)[0], where="test")
    assert set(expected) == set(policy._model.parameters)
    for name, one in weights({name: expected[name] for name in expected}).items():
        assert torch.equal(policy._model.parameters[name].reshape(-1), one), name
    done = tiny.drain_one(policy, tiny.request(0))
    assert {span.version for span in done.versions} == {NUM_VERSIONS - 1}


def test_export_merges_or_leaves_the_adapter_apart(trained, tmp_path: Path) -> None:
    folder, _, backend, told = trained
    final, merged, adapter = tmp_path / "final", tmp_path / "merged", tmp_path / "adapter"
    final.mkdir()
    backend.export(final)
    commands.called("weights", "export", folder.path, "--to", merged)
    line = commands.called("weights", "export", folder.path, "--adapter", "--to", adapter)
    assert line["weights_digest"] == told[-1].weights_digest
    assert {path.name for path in adapter.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert (merged / "model.safetensors").read_bytes() == (final / "model.safetensors").read_bytes()
    for file in adapter.iterdir():
        assert file.read_bytes() == (final / "adapter" / file.name).read_bytes()
    assert json.loads((adapter / "adapter_config.json").read_text())["target_modules"] == ["q_proj", "down_proj"]
    loaded = AutoPeftModelForCausalLM.from_pretrained(adapter).merge_and_unload().state_dict()  # the model is found
    for name, one in load_file(merged / "model.safetensors").items():
        assert torch.allclose(loaded[name].float(), one.float(), atol=2e-3), name


@pytest.mark.parametrize(
    ("folder", "name"),
    [("/hub/models--org--x.y/snapshots/0a1b", "org/x.y"), ("/models--org--x/snapshots/0a1b/nf4", None), ("/x", None)],
)
def test_an_adapter_names_the_model_that_it_belongs_to(folder: str, name: str | None, tmp_path: Path) -> None:
    spec = prepare_model(loader.from_dict(RUN).model, tmp_path / folder[1:], 0)
    write_adapter(tmp_path, spec, {})
    said = json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert said == (name or str(spec.folder))


def test_a_run_trained_as_a_whole_has_no_adapter(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "demo")
    folder.path.mkdir()
    config = loader.from_dict({**RUN, "model": MODEL})
    folder.config_file.write_text(loader.to_toml(config))
    spec = prepare_model(config.model, folder.model, 0)
    transport = EmbeddedTransport(folder.log)
    create_log(transport, config)
    producer = transport.producer("trainer")
    producer.start()
    publisher = WeightsPublisher(ObjectStore("file://weights", base=folder.path), spec.name, spec.dtype)
    told = publisher.publish(tiny.backend(spec).served_tensors(), VersionName(trainer_epoch=1, version=0), resumed=True)
    producer.commit(played_records(transport, "demo", [("weights", 0, told)]))
    producer.close()
    transport.close()
    result = commands.call("weights", "export", folder.path, "--adapter")
    assert result.exit_code == 2
    assert "--adapter: " in result.output


def test_another_run_begins_with_the_merged_weights(trained, tmp_path: Path) -> None:
    _, spec, backend, _ = trained
    final, folder = tmp_path / "final", tmp_path / "second"
    final.mkdir()
    backend.export(final)
    config = loader.from_dict({**RUN, "model": {"init_from": "demo", "dtype": "bfloat16"}, "base": str(tmp_path)})
    fetch_initial(config, folder)
    assert (folder / "model.safetensors").read_bytes() == (final / "model.safetensors").read_bytes()
    assert prepare_model(config.model, folder, 0).name == f"{spec.name}@{NUM_VERSIONS - 1}"


def test_a_run_keeps_its_adapters(trained) -> None:
    folder, *_ = trained
    config = loader.load([folder.config_file], env={})
    manifest = make_manifest(config, "demo", {"taskset.sums": "any"}, 0.0)
    for lora in ({"rank": 4, "targets": ["q_proj", "down_proj"]}, {"rank": 2}, None):
        model = {**MODEL, **({"lora": lora} if lora else {})}
        changed: RunConfig = loader.from_dict({**RUN, "model": model})
        with pytest.raises(ConfigError, match=r"model\.lora\."):
            check_worker(manifest, changed, {})
    check_worker(manifest, config, {})
