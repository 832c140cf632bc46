"""Which device and engine each role gets on a machine, where the run file leaves it to rftstream (`auto`).

`place` computes it from plain data: `Machine` says what is there (models/machine.py reads it), the config says what is
wanted. Settings with a value are kept. Small made models stay on the CPU, which is as fast for them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, groupby, islice
from typing import Any

from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import BackendSpec, PolicySpec
from rftstream.config.role_sections import AUTO
from rftstream.config.sections import RunConfig
from rftstream.contracts.role_names import RoleName

CPU = "cpu"
FAKE = "fake"
"""`model.path` of a model without weights."""
SETTINGS = (
    "trainer.device",
    "trainer.colocate",
    "explorer.policy",
    "explorer.devices",
    "explorer.count",
    "evaluator.device",
    "synthesiser.device",
)
"""Settings that `place` decides if they are `auto`."""
LEAST_SHARE = 0.25
"""GPUs with a smaller share of the largest one's memory, such as that of a screen, are left out."""
VLLM_CAPABILITY = (7, 0)
"""Least compute capability that vLLM supports."""
ENGINE_MEMORY, TURNS_MEMORY = 0.9, 0.85
"""Share of a GPU for the engines on it; if they take turns with the trainer, whose process keeps some memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU that torch sees. Its number is its place in `Machine.gpus`."""

    name: str
    memory_bytes: int
    capability: tuple[int, int] = (0, 0)
    """CUDA's compute capability; (0, 0): unknown."""

    @property
    def text(self) -> str:
        """The name without its maker, and the memory: `H100 80 GB`."""
        name = re.sub(r"^NVIDIA |\b(Tesla|GeForce) |[ -]\d+ ?GB(?! *\d)( HBM\w+)?", "", self.name)
        return f"{name} {math.ceil(self.memory_bytes / 2**30)} GB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine as plain data. `read_machine` reads it; one without GPUs is the default."""

    gpus: tuple[Gpu, ...] = ()
    cores: int = 1
    memory_bytes: int = 0
    has_vllm: bool = False
    """Whether a vLLM for GPUs is installed."""
    trouble: str = ""
    """Why torch does not see the GPUs that are there."""

    def to_text(self) -> str:
        """Return what the machine has, as one line."""
        counts = Counter(gpu.text for gpu in self.gpus)
        gpus = [f"{count} x {text}" if count > 1 else text for text, count in counts.items()]
        return ", ".join([*gpus, f"{self.cores} cores", f"{math.ceil(self.memory_bytes / 2**30)} GB"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the roles of a run compute. `place` makes it."""

    config: RunConfig
    """The config without `auto`."""
    machine: Machine
    chosen: tuple[str, ...] = ()
    """The settings that were left to rftstream."""

    def to_text(self) -> str:
        """Return the devices as one line: `trainer cuda:0 H100 80 GB, explorers cuda:1-3 H100 80 GB (vllm)`."""
        used = _used(self.config)
        shared = self.config.trainer.device if self.config.trainer.in_turns else ""
        by_device: dict[tuple[str, ...], list[str]] = {}
        for role, devices in used.items():
            by_device.setdefault(devices, []).append(role)
        parts, said = [], ""
        for devices, roles in by_device.items():
            numbers = sorted({number for device in devices for number in _numbers(device)})
            where = f"cuda:{_ranges(numbers)}" if numbers else ", ".join(dict.fromkeys(devices))
            gpus = ", ".join(dict.fromkeys(gpu.text for n, gpu in enumerate(self.machine.gpus) if n in numbers))
            words = [
                " and ".join(filter(None, (", ".join(roles[:-1]), roles[-1]))),
                where,
                gpus if gpus != said else "",
            ]
            parts.append(" ".join([*filter(None, words), *(["in turns"] if devices == (shared,) else [])]))
            said = gpus
        engine = "" if self.config.without_tasks else f" ({self.config.explorer.policy})"
        return ", ".join(parts) + engine

    def warnings(self) -> Iterator[str]:
        """Yield a sentence, with the setting to change, for each GPU without work and each data type it lacks."""
        config, gpus = self.config, self.machine.gpus
        if self.machine.trouble:
            yield f"devices: there is a GPU that torch does not see ({self.machine.trouble}); everything is on the CPU"
        if not gpus or _is_small(config):
            return
        used = {number for devices in _used(config).values() for one in devices for number in _numbers(one)}
        if idle := [number for number in range(len(gpus)) if number not in used]:
            names = ", ".join(dict.fromkeys(gpus[number].text for number in idle))
            advice = (
                'trainer.backend = "deepspeed" trains on several'
                if config.without_tasks
                else "name them in explorer.devices, and set explorer.count"
            )
            yield f"devices: cuda:{_ranges(idle)} ({names}) stay{'s' * (len(idle) == 1)} idle; {advice}"
        old = [number for number in sorted(used) if number < len(gpus) and (0, 0) < gpus[number].capability < (8, 0)]
        if old and config.model.dtype == "bfloat16":
            gpu = gpus[old[0]]
            capability = ".".join(map(str, gpu.capability))
            yield (
                f"model.dtype: 'bfloat16', which cuda:{old[0]} ({gpu.text}, compute capability {capability}, below "
                '8.0) does not compute; set model.dtype = "float16", and '
                f'backends.{config.trainer.backend}.autocast = "none"'
            )
        if "explorer.policy" in self.chosen and config.explorer.policy == "hf" and not self.machine.has_vllm and used:
            yield "explorer.policy: 'hf', since vllm is not installed; `rftstream doctor --install vllm` does it"


def chosen_settings(config: RunConfig) -> tuple[str, ...]:
    """Return the settings that the config leaves to rftstream."""
    return tuple(key for key in SETTINGS if _value(config, key) in (AUTO, (AUTO,)))


def _value(config: RunConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name, None)


def place(machine: Machine, config: RunConfig, *, alone: bool = False) -> Placement:
    """Return where the roles compute. `alone`: each role has a machine like this one for itself."""
    chosen = chosen_settings(config)
    if not chosen:
        return Placement(config=config, machine=machine)
    usable = _usable(machine, config)
    trainer = _trainer_device(config, usable)
    processes = _processes(config)
    taken = set(range(_first(trainer), _first(trainer) + processes)) if trainer != CPU and not alone else set()
    free = [f"cuda:{number}" for number in usable if number not in taken]
    turns = [trainer] if not free and trainer != CPU and processes == 1 else []
    loads = config.explorer.policy == AUTO or registry.find_spec(PolicySpec, config.explorer.policy).loads_model
    own = free[-1] if len(free) > 1 and _has_evaluator(config) and config.evaluator.device == AUTO and not alone else ""
    devices = config.explorer.devices
    if devices == (AUTO,):
        devices = tuple([one for one in free if one != own] or turns or [CPU]) if loads else (CPU,)
        most = len(devices) if isinstance(config.explorer.count, str) else max(config.explorer.count, 1)
        devices = devices[: 1 if alone else most]
    policy = config.explorer.policy
    if policy == AUTO:
        policy = "vllm" if machine.has_vllm and _fit_for_vllm(machine, config, devices) else "hf"
    judge = registry.find_spec(PolicySpec, config.evaluator.policy or policy)
    evaluator = config.evaluator.device
    if evaluator == AUTO:
        evaluator = (
            (own or next((one for one in devices if one != CPU), (turns or [CPU])[0])) if judge.loads_model else CPU
        )
    placed = replace(
        config,
        explorer=replace(
            config.explorer,
            policy=policy,
            devices=devices,
            count=len(devices[: 1 if alone else None]) if config.explorer.count == AUTO else config.explorer.count,
        ),
        evaluator=replace(config.evaluator, device=evaluator),
        trainer=replace(config.trainer, device=trainer),
    )
    if config.synthesiser is not None and config.synthesiser.device == AUTO:
        asks = config.synthesiser.ask == "policy" and registry.find_spec(PolicySpec, policy).loads_model
        beside = next((one for one in reversed(free) if asks), CPU)
        placed = replace(placed, synthesiser=replace(config.synthesiser, device=beside))
    if config.trainer.colocate == AUTO:
        turn = not alone and bool({"trainer.device", "explorer.devices"} & set(chosen)) and _can_turn(placed)
        placed = replace(placed, trainer=replace(placed.trainer, colocate=turn))
    if not alone and {"explorer.devices", "evaluator.device"} & set(chosen):
        placed = _with_engine_memory(placed)
    return Placement(config=placed, machine=machine, chosen=chosen)


def with_devices_of(config: RunConfig, other: RunConfig) -> RunConfig:
    """Return the config with the devices of another one, such as `auto`."""
    synthesiser = config.synthesiser
    if synthesiser is not None and other.synthesiser is not None:
        synthesiser = replace(synthesiser, device=other.synthesiser.device)
    return replace(
        config,
        trainer=replace(config.trainer, device=other.trainer.device),
        explorer=replace(config.explorer, devices=other.explorer.devices),
        evaluator=replace(config.evaluator, device=other.evaluator.device),
        synthesiser=synthesiser,
    )


def _usable(machine: Machine, config: RunConfig) -> list[int]:
    """Return the numbers of the GPUs for this run, the largest first."""
    if not machine.gpus or _is_small(config):
        return []
    largest = max(gpu.memory_bytes for gpu in machine.gpus)
    fit = [number for number, gpu in enumerate(machine.gpus) if gpu.memory_bytes >= LEAST_SHARE * largest]
    named = config.trainer.device
    if named == AUTO and _processes(config) == 1:  # the trainer needs most
        first = max(fit, key=lambda number: (machine.gpus[number].memory_bytes, -number))
        return [first, *(number for number in fit if number != first)]
    return fit


def _is_small(config: RunConfig) -> bool:
    return config.model.make is not None or config.model.path == FAKE


def _trainer_device(config: RunConfig, usable: Sequence[int]) -> str:
    if config.trainer.device != AUTO:
        return config.trainer.device
    loads = registry.find_spec(BackendSpec, config.trainer.backend).loads_model
    return f"cuda:{usable[0]}" if usable and loads else CPU


def _processes(config: RunConfig) -> int:
    setting = registry.find_spec(BackendSpec, config.trainer.backend).processes_setting
    found = config.backends.get(config.trainer.backend, {}).get(setting, 1)
    return found if isinstance(found, int) and found > 0 else 1


def _fit_for_vllm(machine: Machine, config: RunConfig, devices: Sequence[str]) -> bool:
    numbers = [number for device in devices for number in _numbers(device)]
    known = all(number < len(machine.gpus) for number in numbers)
    return (
        bool(numbers)
        and known
        and not _is_small(config)
        and all(machine.gpus[number].capability >= VLLM_CAPABILITY for number in numbers)
    )


def _can_turn(config: RunConfig) -> bool:
    """Return whether engines share the trainer's GPU and every one of them can give it free."""
    device = config.trainer.device
    engines = [(config.explorer.policy, one) for one in _explorer_devices(config)]
    if _has_evaluator(config):
        engines.append((config.evaluator.policy or config.explorer.policy, config.evaluator.device))
    sharing = [policy for policy, one in engines if _numbers(one) == _numbers(device) != ()]
    return (
        bool(sharing)
        and _processes(config) == 1
        and registry.find_spec(BackendSpec, config.trainer.backend).leaves_device
        and all(registry.find_spec(PolicySpec, policy).sleeps for policy in sharing)
    )


def _with_engine_memory(config: RunConfig) -> RunConfig:
    """Give each of several engines on a GPU its share of the memory, of which vLLM alone would take all."""
    engines = Counter(_explorer_devices(config))
    if _has_evaluator(config):
        engines[config.evaluator.device] += 1
    most = max((count for device, count in engines.items() if device != CPU), default=0)
    settings = config.policies.get("vllm", {})
    given = settings.get("engine", {})
    uses = "vllm" in (config.explorer.policy, config.evaluator.policy)
    if not uses or (most < 2 and not config.trainer.in_turns) or "gpu_memory_utilization" in given:
        return config
    share = round((TURNS_MEMORY if config.trainer.in_turns else ENGINE_MEMORY) / max(most, 1), 3)
    engine = {**given, "gpu_memory_utilization": share}
    return replace(config, policies={**config.policies, "vllm": {**settings, "engine": engine}})


def _has_evaluator(config: RunConfig) -> bool:
    return bool(config.evaluations) and config.evaluator.count > 0


def _used(config: RunConfig) -> dict[str, tuple[str, ...]]:
    """Return the devices of each role that computes with a model, by the role's name in a sentence."""
    used = {str(RoleName.trainer): _of_trainer(config)}
    if explorers := _explorer_devices(config):
        used[RoleName.explorer + "s" * (len(explorers) > 1)] = explorers
    if _has_evaluator(config):
        used[RoleName.evaluator] = (config.evaluator.device,)
    if config.synthesiser is not None and config.synthesiser.ask == "policy":
        used[RoleName.synthesiser] = (config.synthesiser.device,)
    return used


def _explorer_devices(config: RunConfig) -> tuple[str, ...]:
    """Return the device of each explorer."""
    return () if config.without_tasks else tuple(islice(cycle(config.explorer.devices), config.explorer.processes))


def _of_trainer(config: RunConfig) -> tuple[str, ...]:
    device = config.trainer.device
    if not _numbers(device) or (processes := _processes(config)) == 1:
        return (device,)
    return tuple(f"cuda:{_first(device) + rank}" for rank in range(processes))


def _numbers(device: str) -> tuple[int, ...]:
    """Return the numbers of the GPUs that a device names, () for a CPU."""
    kind, _, numbers = device.partition(":")
    if kind != "cuda":
        return ()
    return tuple(int(number) for number in (numbers or "0").split(",") if number.isdecimal())


def _first(device: str) -> int:
    return next(iter(_numbers(device)), 0)


def _ranges(numbers: Sequence[int]) -> str:
    """Return `1-3,5` for 1, 2, 3 and 5."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
