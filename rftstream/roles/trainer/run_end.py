"""The end of a run: its reason (steps, hours, reward, no more tasks, or draining), and the trained model that it
leaves."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from rftstream.clock import Clock
from rftstream.config.loader import replace
from rftstream.config.sections import RunConfig
from rftstream.config.stages import Stages
from rftstream.contracts.control import RunFinished, TasksEnded
from rftstream.contracts.versions import VersionName
from rftstream.errors import BackendError
from rftstream.roles.trainer.progress import TrainerProgress


class RunEnd:
    """The trainer's knowledge of the end of its run. The step makes it once, and calls `forget` at each recovery. From
    `control` it passes on when the run was created and whether its tasks have ended. After each trained batch it asks
    `reason`, and calls `finish` if there is one."""

    def __init__(
        self,
        config: RunConfig,
        clock: Clock,
        final: Path,
        export: Callable[[Path], None],
        *,
        newest_epoch: Callable[[], int],
        describe: Callable[[Path, int], None] | None = None,
    ) -> None:
        """`final` is the folder for the trained model. `export` fills it, and `describe` adds a description of the
        version. `newest_epoch` reads the newest claim of the trainer's role from the log."""
        self._newest_epoch = newest_epoch
        self._given = config
        self._clock = clock
        self._final = final
        self._export = export
        self._describe = describe
        self.drains = False
        """Whether the user asked for the end. The value is kept when the log is read again."""
        self.forget()

    def forget(self) -> None:
        """Forget the state from the log, which is read again."""
        self.created_at: float | None = None
        """Time when the run was created; None until its manifest was read."""
        self.ended: TasksEnded | None = None
        """The feeder's record that there are no more tasks; None while there may be more."""
        self.config = self._given
        """The config of the run, with the number of steps once it is known."""
        self.stages = Stages.of(self._given)
        self._end_of_steps = "steps"

    def is_known(self) -> bool:
        """Whether the feeder has counted the steps, on which learning rates depend. Asked in a run of demonstrations
        alone."""
        if self.ended is None:
            return False
        steps, counted = self.config.run.steps, self.ended.batches
        if counted is not None and (steps is None or counted < steps):
            self.config = replace(self.config, run__steps=counted)
            self.stages = Stages.of(self.config)
            self._end_of_steps = "experts"
        return True

    def comes_by_itself(self, progress: TrainerProgress) -> bool:
        """Whether the run is draining and no last batch will come. Recorded rollouts that are not trained are kept for
        a resumed run."""
        return self.drains and not self.stages.at(progress.version).takes_rollouts

    def reason(self, progress: TrainerProgress) -> str | None:
        """Return why the run ends with this progress, or None if it goes on."""
        run, steps = self.config.run, self.config.steps
        if steps is not None and progress.version >= steps:
            return self._end_of_steps
        full = len(progress.rewards) >= run.stop_reward_over
        if run.stop_reward is not None and full and sum(progress.rewards) / len(progress.rewards) >= run.stop_reward:
            return "reward"
        if self.comes_by_itself(progress):
            return "drained"
        return self._reason_of_last(progress) or ("hours" if self._hours_over() else None)

    def finish(self, reason: str, name: VersionName) -> RunFinished:
        """Write the trained model, and return the record of the run's end. BackendError if another trainer has taken
        over, so that the written model is always that of the log."""

        def fill(folder: Path) -> None:
            self._export(folder)
            if self._describe is not None:
                self._describe(folder, name.version)
            self._check_newest(name)  # before the new model replaces the old one

        self._check_newest(name)  # before files of other processes are removed
        leave_final(self._final, fill)
        return RunFinished(reason=reason, name=name, finished_at=self._clock.now())

    def _check_newest(self, name: VersionName) -> None:
        if (epoch := self._newest_epoch()) > name.trainer_epoch:
            raise BackendError(
                f"{self._final}: found that a trainer of epoch {epoch} has taken over, expected this one, of epoch "
                f"{name.trainer_epoch}, to leave the trained model there"
            )

    def _reason_of_last(self, progress: TrainerProgress) -> str | None:
        """Return why the tasks have ended, if the last trained batch was marked as the run's last and still is the
        last. A resumed run may have got more steps."""
        if self.ended is None or progress.last_admitted != self.ended.admitted:
            return None
        return "drained" if self.ended.reason == "draining" else self.ended.reason

    def _hours_over(self) -> bool:
        hours = self.config.run.hours
        return hours is not None and self.created_at is not None and self._clock.now() - self.created_at >= hours * 3600


def leave_final(final: Path, export: Callable[[Path], None]) -> None:
    """Write the trained model into the folder `final`, which appears as a whole or not at all. `export` fills it. An
    earlier model is replaced. BackendError if another process removes the files while they are written."""
    final.parent.mkdir(parents=True, exist_ok=True)
    for leftover in final.parent.glob(".final-*"):  # left by a trainer that was killed here
        shutil.rmtree(leftover, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=".final-", dir=final.parent))
    try:
        export(folder)
        folder.chmod(0o755)
    except Exception as error:
        if folder.is_dir() or not isinstance(error, OSError):
            shutil.rmtree(folder, ignore_errors=True)
            raise
        raise BackendError(
            f"{folder}: was removed while the trained model was written there, as a trainer does that takes this one "
            "for dead; start the trainer again"
        ) from error
    if final.exists():
        shutil.rmtree(final)
    folder.rename(final)
