import contextlib
import itertools

import pytest
import torch

from rftstream.backends.deepspeed.rank_processes import Ranks
from rftstream.backends.deepspeed.worlds import steady
from tests.unit.backends.kept_ranks import TIMEOUT_S, KeptRanks, import_for_good


@pytest.fixture(scope="session")
def imported():
    import_for_good()


@pytest.fixture
def open_alone(imported):
    """Opens a backend and closes the one before: DeepSpeed is there once in a process."""
    opened = []

    def close():
        for backend in opened:
            backend.close()

    def open_next(backend):
        close()
        opened.append(backend)
        backend.open()
        return backend

    yield open_next
    close()


@pytest.fixture
def no_room(monkeypatch):
    """A context in which the device has no room for the bytes that are to come at a given place, counted from 1."""

    @contextlib.contextmanager
    def full_at(place):
        resize, numbers = torch.UntypedStorage.resize_, itertools.count(1)

        def resize_if_there_is_room(storage, num_bytes):
            if next(numbers) == place:
                raise torch.cuda.OutOfMemoryError
            return resize(storage, num_bytes)

        with monkeypatch.context() as patch:
            patch.setattr(torch.UntypedStorage, "resize_", resize_if_there_is_room)
            yield

    return full_at


@pytest.fixture(scope="session")
def kept(imported):
    """Processes by number, two unless another is asked for; others, if a test has brought them to their end."""
    started = {}

    def ranks(count=2):
        if count not in started or started[count].ended:
            started[count] = KeptRanks(count, threads=1, timeout_s=TIMEOUT_S)
        return started[count]

    yield ranks
    for one in started.values():
        Ranks.end(one)


@pytest.fixture
def open_kept(kept, monkeypatch, open_alone):
    """Opens a backend, whose ranks are the kept ones if it has several, and closes the one before. What a test patches
    is undone after the last one is closed: a close puts back the functions that were there when it was opened."""

    def ranks(processes, **settings):
        return Ranks(processes, **settings) if processes == 1 else kept(processes)

    def open_next(backend):
        with monkeypatch.context() as patch:
            patch.setattr(steady, "Ranks", ranks)
            return open_alone(backend)

    return open_next
