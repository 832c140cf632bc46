"""Whether a run has come to its end, and by what: its steps, its hours, its reward, its tasks, or because it drains."""

from __future__ import annotations

from rftstream.clock import Clock
from rftstream.config.loader import replace
from rftstream.config.sections import RunConfig
from rftstream.config.stages import Stages
from rftstream.contracts.control import TasksEnded
from rftstream.roles.trainer.progress import TrainerProgress


class RunEnd:
    def __init__(self, config: RunConfig, clock: Clock) -> None:
        self._given = config
        self._clock = clock
        self.drains = False
        """As the user asked; that stays when the log is read anew."""
        self.forget()

    def forget(self) -> None:
        """What the log said."""
        self.created_at: float | None = None
        self.ended: TasksEnded | None = None
        self.config = self._given
        """With the number of steps, once that was counted."""
        self.stages = Stages.of(self._given)
        self._end_of_steps = "steps"

    def is_known(self) -> bool:
        """Of a run of demonstrations alone: the feeder has counted how many steps there are, which rates depend on."""
        if self.ended is None:
            return False
        steps, counted = self.config.run.steps, self.ended.batches
        if counted is not None and (steps is None or counted < steps):
            self.config = replace(self.config, run__steps=counted)
            self.stages = Stages.of(self.config)
            self._end_of_steps = "experts"
        return True

    def comes_by_itself(self, progress: TrainerProgress) -> bool:
        """A drained run, where no last batch will come: what is recorded and not trained stays for later."""
        return self.drains and not self.stages.at(progress.version).takes_rollouts

    def reason(self, progress: TrainerProgress) -> str | None:
        """None if it goes on."""
        run, steps = self.config.run, self.config.steps
        if steps is not None and progress.version >= steps:
            return self._end_of_steps
        full = len(progress.rewards) >= run.stop_reward_over
        if run.stop_reward is not None and full and sum(progress.rewards) / len(progress.rewards) >= run.stop_reward:
            return "reward"
        if self.comes_by_itself(progress):
            return "drained"
        return self._reason_of_last(progress) or ("hours" if self._hours_over() else None)

    def _reason_of_last(self, progress: TrainerProgress) -> str | None:
        """Set if the last trained batch was the run's last, and still is: a resumed run may have been given more."""
        if self.ended is None or progress.last_admitted != self.ended.admitted:
            return None
        return "drained" if self.ended.reason == "draining" else self.ended.reason

    def _hours_over(self) -> bool:
        hours = self.config.run.hours
        return hours is not None and self.created_at is not None and self._clock.now() - self.created_at >= hours * 3600
