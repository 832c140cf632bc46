"""How an engine's workers read new weights, with a stand-in for vLLM's reloading: a layer that is given anything is
made anew, and what it is not given of itself is rubbish."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rftstream.policies.vllm.shared import WeightsMirror
from rftstream.policies.vllm.worker import WeightsReceiver, map_tensors
from rftstream.weights.snapshot import RawTensor

ROWS, WIDTH = 4, 3
PLACES = {
    "attention.q": ("qkv", 0), "attention.k": ("qkv", 1), "attention.v": ("qkv", 2), "down": ("down", 0),
    "gate": ("gate_up", 0), "up": ("gate_up", 1), "norm": ("norm", 0),
}  # fmt: skip
"""Name in the checkpoint -> layer of the engine's model, and place in it."""


class Layer(torch.nn.Module):
    """A layer that fuses `parts` tensors, and has the rows of one rank of several."""

    def __init__(self, parts, rank, ranks):
        super().__init__()
        self.rows, self.rank = ROWS // ranks, rank
        self.weight = torch.nn.Parameter(torch.full((parts * self.rows, WIDTH), torch.nan), requires_grad=False)
        self.weight.weight_loader = self.load

    def load(self, parameter, loaded, place):
        mine = loaded[self.rank * self.rows : (self.rank + 1) * self.rows]
        parameter.data[place * self.rows : (place + 1) * self.rows] = mine


class Worker(WeightsReceiver):
    """As much of vLLM's worker as is used. `keeps_back`: its loader puts aside so many tensors before it loads them."""

    def __init__(self, rank=0, ranks=1, keeps_back=0):
        self.model = torch.nn.Module()
        for name in dict.fromkeys(layer for layer, _ in PLACES.values()):
            self.model.add_module(name, Layer(sum(one == name for one, _ in PLACES.values()), rank, ranks))
        self.keeps_back, self.loads = keeps_back, []

    def get_model(self):
        return self.model

    def reload_weights(self, weights_iterator):
        given, aside, begun = [], [], set()
        for name, tensor in weights_iterator:
            given.append(name)
            aside.append((name, tensor))
            if len(aside) > self.keeps_back:
                self.put(aside.pop(0), begun)
        for one in aside:
            self.put(one, begun)
        self.loads.append(given)

    def put(self, one, begun):
        name, tensor = one
        if name not in PLACES:
            return
        layer, place = PLACES[name]
        parameter = self.model.get_submodule(layer).weight
        if layer not in begun:
            parameter.data.fill_(torch.nan)
            begun.add(layer)
        parameter.weight_loader(parameter, tensor, place)

    def holds(self):
        return {layer: one.weight.clone() for layer, one in self.model.named_children()}


def checkpoint(more=(), **changed):
    values = {name: 10.0 * number for number, name in enumerate((*PLACES, *more))} | changed
    return {
        name: RawTensor("F32", (ROWS, WIDTH), np.arange(value, value + ROWS * WIDTH, dtype=np.float32))
        for name, value in values.items()
    }


def mirror(more=()):
    return WeightsMirror(dict.fromkeys((*PLACES, *more), ("F32", (ROWS, WIDTH))))


def check_holds(worker, tensors, rank=0, ranks=1):
    """The layers are those of these weights, all of them, and nothing is left of others."""
    whole = Worker(rank, ranks)
    whole.reload_weights(
        (name, torch.from_numpy(np.array(tensors[name].data)).reshape(ROWS, WIDTH)) for name in sorted(tensors)
    )
    for layer, values in whole.holds().items():
        assert torch.equal(worker.holds()[layer], values), layer


def test_what_changed_is_given_with_all_else_of_its_layers():
    worker, shared = Worker(), mirror()
    first = shared.write(checkpoint())
    assert worker.rftstream_load(first.memory.path) == {"tensors": 7, "changed": 7, "given": 7}
    check_holds(worker, checkpoint())
    tensors = checkpoint(**{"attention.k": 500.0, "norm": 600.0})
    second = shared.write(tensors)
    changed = second.changed_since(first.marks)
    assert changed == ["attention.k", "norm"]
    assert worker.rftstream_load(second.memory.path, changed) == {"tensors": 7, "changed": 2, "given": 4}
    assert worker.loads[1] == ["attention.k", "attention.q", "attention.v", "norm"]
    check_holds(worker, tensors)
    third = shared.write(checkpoint())
    worker.rftstream_load(third.memory.path, third.changed_since(second.marks))
    check_holds(worker, checkpoint())
    assert [len(given) for given in worker.loads] == [7, 4, 4]


def test_the_first_load_is_whole_whatever_changed():
    worker, shared = Worker(), mirror().write(checkpoint())
    assert worker.rftstream_load(shared.memory.path, ["norm"]) == {"tensors": 7, "changed": 1, "given": 7}
    check_holds(worker, checkpoint())


def test_a_tensor_that_is_not_there_is_an_error():
    worker, shared = Worker(), mirror().write(checkpoint())
    worker.rftstream_load(shared.memory.path)
    worker._rftstream_uses._layers["other"] = set()
    with pytest.raises(KeyError, match="other"):
        worker.rftstream_load(shared.memory.path, ["other"])


def test_a_layer_that_shares_another_ones_weight_is_prepared_when_that_was_loaded():
    worker, shared, prepared = Worker(), mirror(), []
    norm = worker.model.get_submodule("norm")
    head = torch.nn.Module()
    head.weight = norm.weight
    head.cpu_linear = head.quant_method = SimpleNamespace(process_weights_after_loading=prepared.append)
    worker.model.add_module("head", head)
    worker.rftstream_load(shared.write(checkpoint()).memory.path)
    assert prepared == [head]
    worker.rftstream_load(shared.write(checkpoint(down=300.0)).memory.path, ["down"])
    assert prepared == [head]
    worker.rftstream_load(shared.write(checkpoint(down=300.0, norm=1.0)).memory.path, ["norm"])
    assert prepared == [head, head]


def test_a_change_of_a_tensor_that_went_into_no_layer_brings_all():
    worker, shared = Worker(), mirror(["unused"])
    first = shared.write(checkpoint(["unused"]))
    worker.rftstream_load(first.memory.path)
    second = shared.write(checkpoint(["unused"], norm=300.0))
    worker.rftstream_load(second.memory.path, ["norm"])
    third = shared.write(checkpoint(["unused"], norm=300.0, unused=400.0))
    worker.rftstream_load(third.memory.path, ["unused"])
    assert [len(given) for given in worker.loads] == [8, 1, 8]


@pytest.mark.parametrize("keeps_back", [1, 2, 99])
def test_a_loader_that_puts_tensors_aside_is_given_all(keeps_back):
    worker, shared = Worker(keeps_back=keeps_back), mirror()
    worker.rftstream_load(shared.write(checkpoint()).memory.path)
    tensors = checkpoint(norm=300.0)
    assert worker.rftstream_load(shared.write(tensors).memory.path, ["norm"])["given"] == 7
    check_holds(worker, tensors)


def test_a_layer_that_was_given_only_a_part_is_loaded_whole_at_once():
    """As when the loader does something else than the first time."""
    worker, shared = Worker(), mirror()
    worker.rftstream_load(shared.write(checkpoint()).memory.path)
    uses = worker._rftstream_uses
    uses.needed = lambda changed: sorted(changed)
    tensors = checkpoint(gate=300.0)
    assert worker.rftstream_load(shared.write(tensors).memory.path, ["gate"]) == {
        "tensors": 7, "changed": 1, "given": 7
    }  # fmt: skip
    assert [len(given) for given in worker.loads] == [7, 1, 7]
    check_holds(worker, tensors)


def test_tensors_are_views_of_the_memory_and_a_loader_may_write_to_them():
    shared = mirror().write(checkpoint())
    tensors = map_tensors(shared.memory.path)
    place = tensors["down"].data_ptr()
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "rftstream-weights" in line]
    ranges = [[int(end, 16) for end in one[0].split("-")] for one in lines if one[1].startswith("rw-p")]
    assert any(begin <= place < end for begin, end in ranges)
    assert tensors["down"].flatten().tolist() == list(range(30, 42))
    tensors["down"] += 1000
    assert map_tensors(shared.memory.path)["down"].flatten().tolist() == list(range(30, 42))


def test_dtypes_and_empty_tensors():
    forms = {"a": ("BF16", (2, 2)), "b": ("F8_E4M3", (3,)), "c": ("F32", (0, 4)), "d": ("I64", ()), "e": ("F16", (1,))}
    sizes = {"a": 8, "b": 3, "c": 0, "d": 8, "e": 2}
    shared = WeightsMirror(forms).write({n: RawTensor(*forms[n], bytes(sizes[n])) for n in forms})
    found = {name: (one.dtype, tuple(one.shape)) for name, one in map_tensors(shared.memory.path).items()}
    assert found == {
        "a": (torch.bfloat16, (2, 2)), "b": (torch.float8_e4m3fn, (3,)), "c": (torch.float32, (0, 4)),
        "d": (torch.int64, ()), "e": (torch.float16, (1,)),
    }  # fmt: skip


def test_after_an_error_in_the_middle_of_a_write_all_has_changed():
    class Broken(dict):
        def __getitem__(self, name):
            if name == "up":
                raise OSError("unreadable")
            return super().__getitem__(name)

    made = mirror()
    first = made.write(checkpoint())
    with pytest.raises(OSError, match="unreadable"):
        made.write(Broken(checkpoint(norm=1.0)))
    with first.reading() as is_current:
        assert not is_current
    second = made.write(checkpoint())
    assert second.changed_since(first.marks) == list(second)


RANK = """
import json, sys
from tests.unit.policies.test_vllm_worker import Worker
worker = Worker(int(sys.argv[1]), 2)
for line in sys.stdin:
    path, *changed = line.split()
    answer = worker.rftstream_load(path, changed or None)
    held = {layer: one.tolist() for layer, one in worker.holds().items()}
    print(json.dumps([answer, held]), flush=True)
"""


@pytest.mark.slow
def test_two_ranks_read_their_shards_of_one_memory():
    """Tensor parallelism by hand: two processes, each with half of the rows of every tensor."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    shared, marks = mirror(), None
    try:
        for tensors in (checkpoint(), checkpoint(up=300.0), checkpoint(up=300.0, **{"attention.q": 7.0, "down": 9.0})):
            version = shared.write(tensors)
            changed = version.changed_since(marks)
            for process in ranks:
                assert process.stdin is not None
                process.stdin.write(" ".join([version.memory.path, *(changed or ())]) + "\n")
                process.stdin.flush()
            answers = []
            for rank, process in enumerate(ranks):
                assert process.stdout is not None
                answer, held = json.loads(process.stdout.readline())
                answers.append(answer)
                values = {layer: torch.tensor(rows) for layer, rows in held.items()}
                check_holds(SimpleNamespace(holds=values.copy), tensors, rank, 2)
            assert answers[0] == answers[1]
            marks = version.marks
        assert answers[0] == {"tensors": 7, "changed": 2, "given": 4}
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
