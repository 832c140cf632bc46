"""Devices, engine and number of explorers by machine and run file, on made-up machines."""

from rftstream.config import loader
from rftstream.config.colocation import check_colocation
from rftstream.config.placement import Gpu, Machine, chosen_settings, place
from tests.configs import small_run
from tests.suite.each import each

GB = 2**30
H100 = Gpu(name="NVIDIA H100 80GB HBM3", memory_bytes=int(79.1 * GB), capability=(9, 0))
RTX = Gpu(name="NVIDIA GeForce RTX 4090", memory_bytes=int(23.6 * GB), capability=(8, 9))
T4 = Gpu(name="Tesla T4", memory_bytes=int(14.6 * GB), capability=(7, 5))
K80 = Gpu(name="Tesla K80", memory_bytes=12 * GB, capability=(3, 7))
MIG = Gpu(name="NVIDIA H100 80GB HBM3 MIG 1g.10gb", memory_bytes=int(9.8 * GB), capability=(9, 0))
SCREEN = Gpu(name="NVIDIA T400", memory_bytes=4 * GB, capability=(7, 5))


def machine(*gpus, vllm=True):
    return Machine(gpus=gpus, cores=16, memory_bytes=64 * GB, has_vllm=vllm)


def wanted(**sections):
    return small_run(**{"model": {"path": "a/model"}, **sections})


EVALUATED = {"evaluations": {"held-out": {"source": "arithmetic"}}}
ALONE = {"tasksets": {}, "experts": {"source": "jsonl:x.jsonl"}, "trainer": {"algorithm": "sft"}}


@each(("gpus", "sections", "text"), [
    ([], {}, "trainer and explorer cpu (hf)"),
    ([RTX], {}, "trainer and explorer cuda:0 RTX 4090 24 GB in turns (vllm)"),
    ([MIG], EVALUATED, "trainer, explorer and evaluator cuda:0 H100 MIG 1g.10gb 10 GB in turns (vllm)"),
    ([H100] * 2, EVALUATED, "trainer cuda:0 H100 80 GB, explorer and evaluator cuda:1 (vllm)"),
    ([H100] * 4, {}, "trainer cuda:0 H100 80 GB, explorers cuda:1-3 (vllm)"),
    ([H100] * 8, EVALUATED, "trainer cuda:0 H100 80 GB, explorers cuda:1-6, evaluator cuda:7 (vllm)"),
    ([RTX, H100, RTX], {}, "trainer cuda:1 H100 80 GB, explorers cuda:0,2 RTX 4090 24 GB (vllm)"),
    ([SCREEN, RTX], {}, "trainer and explorer cuda:1 RTX 4090 24 GB in turns (vllm)"),
    ([K80] * 2, {}, "trainer cuda:0 K80 12 GB, explorer cuda:1 (hf)"),
    ([H100] * 8, ALONE, "trainer cuda:0 H100 80 GB"),
    ([H100] * 8, {"trainer": {"backend": "deepspeed"}, "backends": {"deepspeed": {"processes": 4}}},
     "trainer cuda:0-3 H100 80 GB, explorers cuda:4-7 (vllm)"),
    ([H100] * 2, {"explorer": {"policy": "openai"}}, "trainer cuda:0 H100 80 GB, explorer cpu (openai)"),
    ([H100] * 2, {"explorer": {"policy": "fake"}, "trainer": {"backend": "fake"}}, "trainer and explorer cpu (fake)"),
    ([H100] * 2, {"model": {"make": {}}}, "trainer and explorer cpu (hf)"),
    # what the run file says wins
    ([H100] * 4, {"trainer": {"device": "cuda:3"}}, "trainer cuda:3 H100 80 GB, explorers cuda:0-2 (vllm)"),
    ([H100] * 4, {"trainer": {"device": "cpu"}}, "trainer cpu, explorers cuda:0-3 H100 80 GB (vllm)"),
    ([H100] * 4, {"explorer": {"count": 2}}, "trainer cuda:0 H100 80 GB, explorers cuda:1-2 (vllm)"),
    ([H100] * 4, {"explorer": {"devices": ["cuda:2,3"]}}, "trainer cuda:0 H100 80 GB, explorer cuda:2-3 (vllm)"),
    ([H100] * 4, {"explorer": {"policy": "hf", "devices": ["cpu"], "count": 3}},
     "trainer cuda:0 H100 80 GB, explorers cpu (hf)"),
    ([RTX], {"trainer": {"colocate": False}}, "trainer and explorer cuda:0 RTX 4090 24 GB (vllm)"),
    ([RTX], {"trainer": {"device": "cuda:0"}, "explorer": {"devices": ["cuda:0"]}},
     "trainer and explorer cuda:0 RTX 4090 24 GB (vllm)"),
])  # fmt: skip
def test_every_role_has_its_place(gpus, sections, text):
    placed = place(machine(*gpus), wanted(**sections))
    assert placed.to_text() == text
    assert chosen_settings(placed.config) == ()
    check_colocation(placed.config)
    assert place(machine(), placed.config).config == placed.config, "nothing that was decided is decided again"
    assert loader.from_toml(loader.to_toml(placed.config)) == placed.config


@each(("gpus", "sections", "share"), [
    ([RTX], {}, 0.85),
    ([RTX], EVALUATED, 0.425),
    ([H100] * 2, EVALUATED, 0.45),
    ([H100] * 2, {}, None),
    ([H100] * 2, EVALUATED | {"policies": {"vllm": {"engine": {"gpu_memory_utilization": 0.3}}}}, 0.3),
])  # fmt: skip
def test_engines_on_one_gpu_share_its_memory(gpus, sections, share):
    placed = place(machine(*gpus), wanted(**sections)).config
    assert placed.policies.get("vllm", {}).get("engine", {}).get("gpu_memory_utilization") == share


def test_a_worker_that_is_alone_takes_the_first_gpu():
    placed = place(machine(RTX), wanted(**EVALUATED), alone=True).config
    assert (placed.trainer.device, placed.explorer.devices, placed.evaluator.device) == (
        "cuda:0",
        ("cuda:0",),
        "cuda:0",
    )
    assert (placed.trainer.colocate, placed.explorer.count, placed.explorer.policy) == (False, 1, "vllm")


@each(("found", "sections", "warnings"), [
    (machine(RTX), {}, []),
    (machine(), {}, []),
    (machine(*[H100] * 4), {"explorer": {"count": 1}},
     ["devices: cuda:2-3 (H100 80 GB) stay idle; name them in explorer.devices, and set explorer.count"]),
    (machine(*[H100] * 2), ALONE,
     ['devices: cuda:1 (H100 80 GB) stays idle; trainer.backend = "deepspeed" trains on several']),
    (machine(T4), {}, ["model.dtype: 'bfloat16', which cuda:0 (T4 15 GB, compute capability 7.5, below 8.0) does not "
     'compute; set model.dtype = "float16", and backends.torch.autocast = "none"']),
    (machine(T4), {"model": {"path": "a/model", "dtype": "float16"}}, []),
    (machine(RTX, vllm=False), {},
     ["explorer.policy: 'hf', since vllm is not installed; `rftstream doctor --install vllm` does it"]),
    (Machine(trouble="the driver is too old"), {},
     ["devices: there is a GPU that torch does not see (the driver is too old); everything is on the CPU"]),
])  # fmt: skip
def test_what_a_machine_leaves_unused_is_said_with_the_setting(found, sections, warnings):
    assert list(place(found, wanted(**sections)).warnings()) == warnings
