"""The images: their steps are run without a builder, and what they make works for a user with few rights."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.deploy.conftest import ROOT
from tests.deploy.dockerfile import USER, Image, Stage, build, environment, read_stages, uv_cache
from tests.e2e.workplace import FAKE
from tests.loopback import HttpServer

STAGES = read_stages()
TARGETS = ("roles", "cpu", "gpu")
TRY_TO_WRITE = "for place in / /opt/rftstream /work /usr; do touch $place/x 2>/dev/null && echo $place; done; id -u"


def image_of(target: str, root: Path, stages: Mapping[str, Stage] = STAGES) -> Image:
    """Build an image: steps of its last stages are settings alone, save that the packages are copied."""
    build("wheel", root / "wheel", {})
    image = build(f"build-{target}", root / target, {"wheel": root / "wheel"}, stages=stages)
    image.environment = {}
    for arguments in STAGES["base"].all("ENV") + STAGES[target].all("ENV"):
        image.environment.update(environment(arguments, image.environment))
    [image.workdir] = STAGES["base"].all("WORKDIR")
    return image


def volumes(root: Path) -> dict[str, Path]:
    """Return folders of this machine for the volumes of the image, which belong to its user."""
    [line] = STAGES["base"].all("VOLUME")
    found = {}
    for path in json.loads(line):
        found[path] = root / path.strip("/").replace("/", "-")
        found[path].mkdir(parents=True)
        if os.geteuid() == 0:
            os.chown(found[path], USER, USER)
    return {**found, str(uv_cache()): uv_cache()}


def run(image: Image, command: str, mounts: Mapping[str, Path], code: int = 0) -> str:
    done = image.run(shlex.split(command), mounts=mounts, user=USER, is_writable=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.sampled(2, "installed")
@pytest.mark.slow
def test_the_small_image_does_the_work_of_roles(tmp_path: Path) -> None:
    """As a user without rights, and without PyTorch; with `fake` parts it can be every role of a run."""
    image = image_of("roles", tmp_path)
    (image.folder("/work") / "tiny.toml").write_text(FAKE)
    mounts = volumes(tmp_path / "volumes")
    assert run(image, f"bash -c {shlex.quote(TRY_TO_WRITE)}", mounts).split() == [str(USER)]
    assert "No module named 'torch'" in run(image, "python -c 'import torch'", mounts, code=1)
    run(image, "python -c 'import s3fs, pyarrow, starlette, opentelemetry.sdk'", mounts)
    assert "ended by: steps" in run(image, "rftstream run tiny.toml --set run.folder=/runs --progress none", mounts)
    assert "balanced" in run(image, "rftstream audit /runs/tiny", mounts)


@pytest.mark.long
def test_the_image_for_cpus_trains(tmp_path: Path) -> None:
    """PyTorch comes from the cache, in the build that scripts/setup took."""
    stage = STAGES["build-cpu"]
    steps = [(name, text.replace('"$TORCH_FROM"', "")) for name, text in stage.steps]
    image = image_of("cpu", tmp_path, {**STAGES, "build-cpu": replace(stage, steps=steps)})
    example = (ROOT / "examples" / "arithmetic.toml").read_text(encoding="utf-8")
    (image.folder("/work") / "arithmetic.toml").write_text(example)
    mounts = volumes(tmp_path / "volumes")
    settings = "--set run.folder=/runs --set run.steps=2 --progress none"
    assert "ended by: steps" in run(image, f"rftstream run arithmetic.toml {settings}", mounts)


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_has_a_user_without_rights_and_packages_of_its_own(target: str) -> None:
    stage = STAGES[target]
    users = STAGES["base"].all("USER") + stage.all("USER")
    assert stage.base == "base"
    assert users[-1] == f"{USER}:{USER}"
    assert stage.all("COPY") == [f"--from=build-{target} /opt/rftstream /opt/rftstream"]
    assert STAGES[f"build-{target}"].base == "tools"


def test_the_base_is_pinned_and_nothing_of_a_package_index_is_kept() -> None:
    text = (ROOT / "deploy" / "docker" / "Dockerfile").read_text(encoding="utf-8")
    assert re.search(r"^ARG PYTHON_IMAGE=python:3\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}$", text, re.MULTILINE)
    for stage in STAGES.values():
        assert stage.base in STAGES or stage.base == "${PYTHON_IMAGE}"
        for command in stage.all("RUN"):
            assert "pip install" not in command or "uv pip" in command or "--no-cache-dir" in command
            assert "apt-get" not in command or "rm -rf /var/lib/apt/lists/*" in command
    assert environment(STAGES["tools"].all("ENV")[0], {})["UV_NO_CACHE"] == "1"
    assert STAGES["base"].all("HEALTHCHECK")
    assert len([label for line in STAGES["base"].all("LABEL") for label in shlex.split(line)]) >= 6


def test_packages_for_gpus_are_all_that_rftstream_requires() -> None:
    """gpu.txt is installed without looking at dependencies."""
    lines = (ROOT / "deploy" / "docker" / "gpu.txt").read_text(encoding="utf-8").splitlines()[1:]
    versions = {name.lower(): version for name, _, version in (line.partition("==") for line in lines)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(one for extra in ("vllm", "deepspeed", "lora", "s3") for one in extras[extra]),
    ]
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(versions[requirement.name]), requirement


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_a_container_is_as_healthy_as_its_worker_says(status: int, code: int) -> None:
    with HttpServer(lambda _: (status, "the loop came round 3 s ago")) as server:
        done = subprocess.run(
            [sys.executable, "-S", ROOT / "deploy" / "docker" / "healthy.py"], capture_output=True, text=True,
            env={**os.environ, "RFTSTREAM_METRICS_PORT": str(server.port)}, timeout=12000,
        )  # fmt: skip
    assert done.returncode == code
    assert [one.path for one in server.asked] == ["/health"]
    assert "3 s ago" in done.stdout + done.stderr
