"""A run keeps its devices, and on another machine those that nobody named are decided again."""

import pytest

from rftstream.config import loader
from rftstream.config.placement import Gpu, Machine, place
from rftstream.runs import placed
from rftstream.runs.folder import RunFolder
from rftstream.runs.making.create import write_config
from tests.configs import small_run

HERE = Machine(gpus=(Gpu(name="L4", memory_bytes=23 << 30),) * 2, cores=8)
OTHER = Machine(cores=4)


@pytest.mark.parametrize(("machine", "sets", "device", "policy"), [
    (HERE, [], "cuda:0", "hf"),
    (OTHER, [], "auto", "auto"),
    (OTHER, ["explorer.policy=openai"], "auto", "openai"),
])  # fmt: skip
def test_what_was_decided_is_open_again_on_another_machine(tmp_path, monkeypatch, machine, sets, device, policy):
    wanted = small_run(model={"path": "a/model"}, evaluator={"device": "cuda:1"})
    folder = RunFolder(tmp_path)
    placement = place(HERE, wanted)
    write_config(placement.config, folder)
    placed.record_placement(placement, folder)
    monkeypatch.setattr(placed, "read_machine", lambda: machine)
    config = placed.placed_anew(folder, sets)
    assert (config.trainer.device, config.explorer.policy) == (device, policy)
    assert config.evaluator.device == "cuda:1", "the run file named it"


def test_a_run_that_recorded_nothing_keeps_its_devices(tmp_path, monkeypatch):
    config = loader.replace(small_run(), trainer__device="cuda:3")
    folder = RunFolder(tmp_path)
    write_config(config, folder)
    monkeypatch.setattr(placed, "read_machine", lambda: OTHER)
    assert placed.placed_anew(folder, []) == config
