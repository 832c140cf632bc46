"""The lock of a device: engines together or a trainer alone, and nothing is left of who is gone."""

import shutil
import subprocess
import sys

import pytest

from rftstream.errors import ConfigError
from rftstream.models.device_lock import FileLock, physical_name
from tests.waiting import wait_until

WITHIN_S = 60.0

HOLDER = """
import sys, time
from pathlib import Path
from rftstream.models.device_lock import FileLock
lock = FileLock("cuda:0", folder=Path(sys.argv[1]))
assert getattr(lock, sys.argv[2])()
print("holds", flush=True)
time.sleep(600)
"""


@pytest.fixture
def make(tmp_path):
    made = []

    def lock(device="cuda:0"):
        made.append(FileLock(device, folder=tmp_path))
        return made[-1]

    yield lock
    for one in made:
        one.close()


def test_engines_hold_it_together_and_give_way(make):
    first, second, trainer = make(), make(), make()
    assert first.share() and second.share() and not first.is_wanted()
    assert not trainer.take()
    assert first.is_wanted() and second.is_wanted()
    first.release()
    assert not trainer.take() and not first.share(), "nobody comes back before the trainer was there"
    second.release()
    assert trainer.take() and trainer.take()
    assert not first.share() and first.is_wanted()
    trainer.release()
    assert first.share() and second.share() and not first.is_wanted()


def test_a_trainer_may_ask_no_more(make):
    engine, trainer = make(), make()
    assert engine.share() and not trainer.take()
    trainer.release()
    assert not engine.is_wanted() and make().share()


def test_trainers_take_it_one_after_the_other(make):
    first, second = make(), make()
    assert first.take() and not second.take()
    first.release()
    assert second.take() and not first.take()


def test_waiting_ends_when_it_is_free(make):
    engine, trainer = make(), make()
    engine.wait_shared()
    engine.release()
    trainer.wait_taken()
    trainer.release()
    engine.wait_shared()


@pytest.mark.parametrize(("holds", "waits"), [("share", "wait_taken"), ("take", "wait_shared")])
def test_a_process_that_is_told_to_leave_waits_no_more(make, tmp_path, holds, waits):
    looks = []

    def look():
        looks.append(1)
        if len(looks) == 2:
            raise KeyboardInterrupt

    assert getattr(make(), holds)()
    waiting = FileLock("cuda:0", folder=tmp_path, look=look)
    with pytest.raises(KeyboardInterrupt):
        getattr(waiting, waits)()
    waiting.close()


@pytest.mark.parametrize("is_back", [False, True])
def test_files_that_were_removed_are_made_anew(make, tmp_path, is_back):
    """A clean-up of the folder, or of the memory that it lies in: who comes later locks other files."""
    engine, trainer = make(), make()
    shutil.rmtree(tmp_path)
    later = make() if is_back else engine
    assert engine.share() and later.share()
    assert not trainer.take() and later.is_wanted()
    for one in (engine, later):
        one.release()
    assert trainer.take() and not engine.share() and not make().share()


def test_a_folder_that_others_can_write_to_is_refused(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "elsewhere").symlink_to(tmp_path)
    for name in ("open", "elsewhere"):
        with pytest.raises(ConfigError, match=f"trainer.colocate: .*{name} holds locks of devices.* remove it"):
            FileLock("cuda:0", folder=tmp_path / name)


def test_devices_are_locked_apart(make):
    assert make("cuda:0").take() and make("cuda:1").take() and make("cpu").take()


@pytest.mark.parametrize(("holds", "asks"), [("share", "take"), ("take", "share")])
def test_who_is_killed_holds_nothing(make, tmp_path, holds, asks):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path), holds], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"holds\n"
        lock = make()
        assert not getattr(lock, asks)()
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    wait_until(getattr(lock, asks))


def test_a_gpu_has_the_same_name_for_all_that_see_it(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [physical_name(one) for one in ("cpu", "cuda", "cuda:0", "cuda:3")] == ["cpu", "cuda-0", "cuda-0", "cuda-3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5")
    assert [physical_name(one) for one in ("cuda:0", "cuda:1")] == ["cuda-3", "cuda-GPU-5"]
