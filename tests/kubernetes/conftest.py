"""One cluster for all tests of this folder; a namespace for each, and nodes for those that ask for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.broker.conftest import place, run_id, servers
from tests.containers import engine
from tests.e2e.workplace import Workplace
from tests.kubernetes.cluster import Cluster, running
from tests.kubernetes.kubelet import Kubelet
from tests.kubernetes.node import Node, joined
from tests.kubernetes.releases import Release
from tests.suite.told import say

__all__ = ["place", "run_id", "say", "servers"]

WORKER = """\
#!/bin/sh
# A rftstream whose workers end when the test says so, with what it says: ORDERS/ROLE has the exit code.
case $1 in
  status) [ ! -e "ORDERS/finished" ] || echo '"state": "finished"'; [ -e "ORDERS/made" ] || exit 2; exit 0 ;;
  run) : >"ORDERS/made"; exit 0 ;;
esac
trap 'exit 0' TERM
while ! mv "ORDERS/$3" "ORDERS/$3.$$" 2>/dev/null; do sleep 0.5; done
exit "$(cat "ORDERS/$3.$$")"
"""


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("kubernetes") / "cluster") as made:
        yield made


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node of a cluster of its own, on which a real kubelet runs pods."""
    if os.geteuid() != 0:
        pytest.skip("only root may start an engine of its own")
    folder = tmp_path_factory.mktemp("node")
    with engine.running(folder / "engine") as made, joined(made, folder / "cluster") as found:
        yield found


@pytest.fixture
def release(cluster: Cluster, run_id: Callable[[], str], tmp_path: Path) -> Iterator[Release]:
    """A release in a namespace of its own, before it is installed."""
    with Release(cluster, run_id(), tmp_path / "claim") as made:
        yield made


@pytest.fixture
def orders(tmp_path: Path) -> Path:
    """A folder where a test leaves the exit code with which the worker of a role is to end."""
    folder = tmp_path / "orders"
    folder.mkdir()
    return folder


@pytest.fixture
def kubelet(release: Release, place: Workplace, orders: Path) -> Iterator[Kubelet]:
    """The release's pods run, and their `rftstream` does what `orders` says."""
    program = orders.parent / "program"
    program.mkdir()
    (program / "rftstream").write_text(WORKER.replace("ORDERS", str(orders)))
    (program / "rftstream").chmod(0o755)
    with Kubelet(release, place, program=program) as made:
        yield made
