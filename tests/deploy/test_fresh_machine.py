"""The commands of the README on a machine that has Python and make: they set up what they need, or say what it is.

Its wheels, jars and packages are those of the registries, so the test takes as long as they do.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.conftest import ROOT
from tests.deploy.machine import Machine, make_machine

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(6 * 3600),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may make a machine to try this on"),
]

HAD = ("python3", "make")
USER = "anna"
BUILDING = ("gcc", "libc6-dev", r"python3\.\d+-dev", r"python3\.\d+-venv")
NEEDS = {
    "setup": BUILDING,
    "demo": BUILDING,
    "lint": BUILDING,
    "kafka": ("default-jre-headless", "maven"),
    "test": (
        *BUILDING, "default-jdk-headless", "maven", "prometheus", "kcat", "bubblewrap", "chromium", "shellcheck",
        "slurm-client", "munge", "slurmctld", "slurmd", r"g\+\+", "openssl", "git",
        "openssh-client",
    ),
}  # fmt: skip
"""The packages that each target says it misses, for a user who may not install them."""
ON_KAFKA = """
servers=$(make kafka | tail -1)
.venv/bin/rftstream run examples/arithmetic.toml --set run.steps=3 --run-dir /tmp/on-kafka \\
  --set transport.kind=kafka --set transport.servers="$servers"
make kafka-stop
"""
TESTED = (
    "tests/deploy/test_helm.py", "tests/deploy/test_helm_scripts.py", "tests/deploy/test_prometheus.py",
    "tests/unit/sandbox/test_isolation.py", "tests/e2e/test_studio.py", "tests/broker/test_kafka_acls.py",
)  # fmt: skip
"""Tests that start each of the programs that `make test` installs."""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    assert shutil.which("mmdebstrap"), "no mmdebstrap; as root `make .venv/.developer` installs it"
    root = tmp_path_factory.mktemp("machine") / "root"
    yield make_machine(root, HAD, USER, ROOT)
    shutil.rmtree(root)


@pytest.mark.parametrize("target", NEEDS)
def test_a_user_is_told_all_that_is_missing(machine: Machine, target: str) -> None:
    """In one line, before anything else is done: nothing is downloaded, and nothing is left in the checkout."""
    before = checkout(machine)
    done = machine.run(USER, "make", target)
    assert done.returncode == 2, done.stdout
    line, of_make = done.stdout.splitlines()
    assert of_make.startswith("make: *** ")
    told, _, packages = line.partition(" apt-get update && apt-get install --no-install-recommends ")
    assert told == "setup: missing system packages; let root install them and try again:"
    assert re.fullmatch(" ".join(NEEDS[target]), packages), packages
    assert checkout(machine) == before


@pytest.mark.parametrize("target", ["help", "kafka-stop"])
def test_what_needs_nothing_more_works_for_a_user(machine: Machine, target: str) -> None:
    done = machine.run(USER, "make", target)
    assert done.returncode == 0, done.stdout


def test_root_has_everything_set_up(machine: Machine) -> None:
    """After that a user may do the same."""
    succeeds(machine, "root", "make", "demo")
    succeeds(machine, "root", "bash", "-euo", "pipefail", "-c", ON_KAFKA)
    ended = succeeds(machine, "root", "make", "test", f"ARGS={' '.join(TESTED)}")
    assert re.search(r"\d+ passed", ended) and "skipped" not in ended, ended
    succeeds(machine, USER, "bash", "-euo", "pipefail", "-c", "make kafka && make kafka-stop")
    succeeds(machine, USER, "make", "demo")


def succeeds(machine: Machine, user: str, *command: str) -> str:
    done = machine.run(user, *command)
    print(done.stdout)
    assert done.returncode == 0, f"{command}: exit {done.returncode}: {done.stdout[-4000:]}"
    return done.stdout


def checkout(machine: Machine) -> set[Path]:
    return set((machine.root / "home" / USER / "rftstream").rglob("*"))
