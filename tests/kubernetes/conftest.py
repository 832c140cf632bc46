"""One cluster for all tests of this folder; a namespace for each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.kubernetes.cluster import Cluster, running
from tests.kubernetes.releases import Release
from tests.suite.told import say

__all__ = ["say"]
_numbers = itertools.count()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("kubernetes") / "cluster") as made:
        yield made


@pytest.fixture
def release(cluster: Cluster) -> Release:
    """A release in a namespace of its own, before it is installed."""
    return Release(cluster, f"test-{next(_numbers)}")
