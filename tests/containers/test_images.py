"""The images as Docker builds them: small, without a compiler, for a user without rights, with a bill of materials."""

from __future__ import annotations

import json

import pytest

from tests.containers.engine import PYTHON, Engine

pytestmark = [pytest.mark.long, pytest.mark.timeout(4 * 3600)]

MOST_MB = {"roles": 600, "cpu": 2500}
LOOK = """
touch /x /opt/x /opt/rftstream/x /work/x 2>/dev/null
for program in cc gcc c++ g++ ld as make; do command -v $program; done
id -u
"""


def size_mb(engine: Engine, image: str) -> int:
    return round(int(engine.docker("image", "inspect", "--format", "{{.Size}}", image)) / 1e6)


def confined(engine: Engine, image: str, program: str, *words: str) -> str:
    """Run a program of an image as compose and the chart do."""
    rights = ("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--read-only", "--network", "none")
    return engine.docker("run", "--rm", *rights, "--entrypoint", program, image, *words)


def test_roles_is_small_and_has_what_roles_import(engine: Engine, roles: str, say: list[str]) -> None:
    size = size_mb(engine, roles)
    base = f", of which {size_mb(engine, PYTHON)} MB are the stand-in of the base" if engine.has_stand_ins else ""
    say.append(f"{size} MB{base}")
    assert confined(engine, roles, "bash", "-c", LOOK) == "1000", "it writes nowhere, and compiles nothing"
    said = engine.docker("run", "--rm", "--entrypoint", "python", roles, "-c", "import torch", check=False)
    assert "No module named 'torch'" in said
    assert size < MOST_MB["roles"]


def test_the_bill_names_what_is_in_the_image(engine: Engine, roles: str, say: list[str]) -> None:
    bill = json.loads(confined(engine, roles, "python", "/opt/bill.py"))
    names = [part["purl"].partition("@")[0] for part in bill["components"]]
    say.append(f"{len(names)} packages; known holes were not scanned for, since no database of a scanner is here")
    assert {"pkg:pypi/rftstream", "pkg:pypi/kafka-python", "pkg:deb/debian/bubblewrap"} <= set(names)
    assert len(names) == len(set(names)) and "pkg:pypi/torch" not in names


def test_cpu_is_built_where_pytorch_can_be_had(engine: Engine, roles: str, say: list[str]) -> None:
    tools = engine.build("tools")
    ask = "uv venv -q && uv pip install -q --dry-run --no-deps --torch-backend=cpu torch"
    said = engine.docker("run", "--rm", tools, "bash", "-c", f"{ask} && echo there || true")
    if not said.endswith("there"):
        pytest.skip("PyTorch's index for CPUs cannot be reached from here; compose's `cpu` services ran on `roles`")
    size = size_mb(engine, engine.build("cpu"))
    say.append(f"{size} MB")
    assert size < MOST_MB["cpu"]
