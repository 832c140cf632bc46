"""The check that a device named in a run file is on this machine.

It asks torch, and imports torch only for devices other than the CPU."""

from __future__ import annotations

from rftstream.errors import ConfigError


def check_device(device: str, *, where: str = "") -> str:
    """Return a description of the device with this name. ConfigError for a GPU that torch does not see.

    `where` names the setting. `cuda:0,1` names two GPUs. Kinds of devices other than `cuda` are not checked."""
    kind, _, numbers = device.partition(":")
    if kind != "cuda":
        return device
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = numbers.split(",") if numbers else ["0"]
    if not all(number.isdecimal() for number in wanted):
        raise ConfigError(f"{_place(where)}got {device!r}, expected cpu, cuda, cuda:0 or the like")
    if max(map(int, wanted)) >= num_gpus:
        seen = {0: "no GPU", 1: "one GPU, cuda:0"}.get(num_gpus, f"{num_gpus} GPUs, cuda:0 to cuda:{num_gpus - 1}")
        raise ConfigError(
            f"{_place(where)}{device!r} is not there, torch sees {seen} on this machine; set another device"
            f"{' or auto' if where else ''}, or install a torch for this GPU's driver"
        )
    return ", ".join(torch.cuda.get_device_name(int(number)) for number in wanted)


def _place(where: str) -> str:
    return f"{where}: " if where else "device: "
