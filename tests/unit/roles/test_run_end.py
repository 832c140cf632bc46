"""The folder of the trained model, while more than one trainer takes itself for the run's."""

import pytest

from rftstream.contracts.versions import VersionName
from rftstream.errors import BackendError
from rftstream.roles.trainer.run_end import RunEnd
from rftstream.testing.memory_run import ManualClock
from tests.flow.scene import make_config

NAME = VersionName(trainer_epoch=2, version=5)


def model_of(final):
    return (final / "model").read_text()


def make(final, says, *, epoch=2, meanwhile=lambda folder: None):
    def export(folder):
        meanwhile(folder)
        (folder / "model").write_text(says)

    return RunEnd(make_config(), ManualClock(), final, export, newest_epoch=lambda: epoch)


def test_what_was_left_before_is_replaced_whole(tmp_path):
    final = tmp_path / "run" / "final"
    for says in ("first", "second"):
        assert make(final, says).finish("steps", NAME).name == NAME
        assert model_of(final) == says
    assert [one.name for one in final.parent.iterdir()] == ["final"]


@pytest.mark.law("fencing")
def test_one_that_was_taken_for_dead_leaves_what_its_successor_left(tmp_path):
    """The successor removes what it finds, comes to the end, and only then the first one goes on."""
    final = tmp_path / "final"
    successor = VersionName(trainer_epoch=3, version=5)
    first = make(final, "old", meanwhile=lambda _: make(final, "new", epoch=3).finish("steps", successor))
    with pytest.raises(BackendError, match=r"\.final-.*: was removed while the trained model was written there"):
        first.finish("steps", NAME)
    assert model_of(final) == "new"


@pytest.mark.law("fencing")
def test_nor_does_one_whose_folder_was_overlooked(tmp_path):
    final = tmp_path / "final"
    make(final, "new").finish("steps", VersionName(trainer_epoch=3, version=5))
    with pytest.raises(BackendError, match=r"a trainer of epoch 3 has taken over, expected this one, of epoch 2"):
        make(final, "old", epoch=3).finish("steps", NAME)
    assert model_of(final) == "new" and [one.name for one in tmp_path.iterdir()] == ["final"]


def test_other_errors_of_the_disk_stay_what_they_are(tmp_path):
    def full(_):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left") as caught:
        make(tmp_path / "final", "model", meanwhile=full).finish("steps", NAME)
    assert not isinstance(caught.value, BackendError)
    assert not list(tmp_path.iterdir()), "a full disk has its room again"
