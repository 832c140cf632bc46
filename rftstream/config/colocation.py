"""Which workers share a device with the trainer (`trainer.colocate`), and whether their parts can."""

from __future__ import annotations

from collections.abc import Iterator

from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import BackendSpec, PolicySpec
from rftstream.config.parts.reward_uses import reward_uses
from rftstream.config.sections import RunConfig
from rftstream.errors import ConfigError


def is_shared(config: RunConfig, device: str) -> bool:
    """Return whether an engine on this device shares it with the trainer."""
    return config.trainer.in_turns and _named(device) == _named(config.trainer.device)


def check_colocation(config: RunConfig) -> None:
    """Raise ConfigError if no other role shares the trainer's device, or if a part cannot give the device free."""
    if not config.trainer.in_turns:
        return
    engines = [("explorer.policy", config.explorer.policy, device) for device in config.explorer.devices]
    if config.evaluations:
        policy = config.evaluator.policy or config.explorer.policy
        engines.append(("evaluator.policy", policy, config.evaluator.device))
    sharing = [(where, policy) for where, policy, device in engines if is_shared(config, device)]
    if not sharing:
        raise ConfigError(
            f"trainer.colocate: no engine is on trainer.device {config.trainer.device!r}, expected one in "
            "explorer.devices; name the device there, or leave colocate out"
        )
    for where, policy in sharing:
        if not registry.find_spec(PolicySpec, policy).sleeps:
            raise ConfigError(
                f"{where}: {policy!r} cannot give its device free, as trainer.colocate asks of it; use 'hf' or 'vllm', "
                "or leave colocate out"
            )
    for where in _staying(config):
        raise ConfigError(
            f"{where}: on trainer.device {config.trainer.device!r}, which engines and trainer have in turns "
            "(trainer.colocate); what this loads would stay there; name another device"
        )
    backend = registry.find_spec(BackendSpec, config.trainer.backend)
    if not backend.leaves_device:
        raise ConfigError(
            f"trainer.backend: {config.trainer.backend!r} cannot give its device free, as trainer.colocate asks of it; "
            "use 'torch' or 'deepspeed', or leave colocate out"
        )
    count = config.backends.get(config.trainer.backend, {}).get(backend.processes_setting, 1)
    if count != 1:
        raise ConfigError(
            f"backends.{config.trainer.backend}.{backend.processes_setting}: got {count!r}, expected 1 with "
            "trainer.colocate, for one device is had in turns; leave one of them out"
        )


def _staying(config: RunConfig) -> Iterator[str]:
    """Yield each place in the run file that puts a model on the trainer's GPU which never leaves it. A CPU has room for
    it."""
    if config.trainer.device.partition(":")[0] == "cpu":
        return
    synthesiser = config.synthesiser
    if synthesiser is not None and synthesiser.ask == "policy" and is_shared(config, synthesiser.device):
        yield "synthesiser.device"
    for where, sections in (("tasksets", config.tasksets), ("evaluations", config.evaluations)):
        for name, section in sections.items():
            for use in reward_uses(section.reward, f"{where}.{name}.reward"):
                device = {**config.rewards.get(use.name, {}), **use.settings}.get("device")
                if isinstance(device, str) and is_shared(config, device):
                    yield f"{where}.{name}.reward: {use.name}"


def _named(device: str) -> str:
    return "cuda:0" if device == "cuda" else device
