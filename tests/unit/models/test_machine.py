"""What is read of a machine: torch is asked in a process of its own. Here a made-up torch answers."""

import pytest

from rftstream.config.placement import Gpu
from rftstream.models import machine

TORCH = """
import os, sys
from types import SimpleNamespace
GPUS = {gpus}
visible = os.environ.get("CUDA_VISIBLE_DEVICES")
seen = GPUS if visible is None else [GPUS[int(number)] for number in visible.split(",")]
{said}
cuda = SimpleNamespace(
    is_available=lambda: bool(seen),
    device_count=lambda: len(seen),
    get_device_properties=lambda n: SimpleNamespace(
        name=seen[n][0], total_memory=seen[n][1], major=seen[n][2], minor=seen[n][3]),
)
"""
A100 = ("NVIDIA A100-SXM4-80GB", 85_000_000_000, 8, 0)
L4 = ("NVIDIA L4", 24_000_000_000, 8, 9)


@pytest.fixture
def torch_says(tmp_path, monkeypatch):
    """Put a torch in the way of the process that is asked, on a machine with the files of a driver."""
    machine._gpus.cache_clear()
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(machine, "SIGNS", (str(tmp_path / "nvidiactl"),))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def says(*gpus, said=""):
        (tmp_path / "torch.py").write_text(TORCH.format(gpus=list(gpus), said=said))

    yield says
    machine._gpus.cache_clear()


@pytest.mark.parametrize(("gpus", "visible", "names"), [
    ([A100], None, ["A100-SXM4 80 GB"]),
    ([A100] * 8, "2,5", ["A100-SXM4 80 GB"] * 2),
    ([A100, L4], "1", ["L4 23 GB"]),
    ([A100], "", []),
    ([A100], "-1", []),
])  # fmt: skip
def test_gpus_are_those_that_torch_sees(torch_says, monkeypatch, gpus, visible, names):
    torch_says(*gpus)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = machine.read_machine()
    assert [gpu.text for gpu in found.gpus] == names
    assert not found.trouble and found.cores >= 1 and found.memory_bytes > 0


@pytest.mark.parametrize(("said", "trouble"), [
    ("", "a torch for CPUs, or no right to the device"),
    ("print('the driver is too old', file=sys.stderr)", "the driver is too old"),
    ("raise ImportError('no libcudart')", "ImportError: no libcudart"),
])  # fmt: skip
def test_why_torch_sees_none_is_said(torch_says, said, trouble):
    torch_says(said=said)
    assert machine.read_machine().trouble == trouble


def test_without_the_files_of_a_driver_torch_is_not_asked(torch_says, monkeypatch):
    torch_says(A100)
    monkeypatch.setattr(machine, "SIGNS", ())
    assert machine.read_machine().gpus == ()


def test_capabilities_are_read(torch_says):
    torch_says(L4)
    assert machine.read_machine().gpus == (Gpu(name="NVIDIA L4", memory_bytes=24_000_000_000, capability=(8, 9)),)


@pytest.mark.gpu
def test_a_real_gpu_is_described():
    machine._gpus.cache_clear()
    first = machine.read_machine().gpus[0]
    assert first.memory_bytes > 2**30 and first.capability >= (3, 0)
