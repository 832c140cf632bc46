"""Drives one role alone on a log in memory: put records on its topics, let it work, and read its records.

run = MemoryRun(config, folder=tmp_path)
verifier = RoleDriver(run, "verifier")
run.put_manifest()
run.put("rollouts", rollout)
verifier.work()
assert run.messages("verified")[0].verdict.reward == 1.0
"""

from __future__ import annotations

from collections.abc import Callable

from rftstream.roles.build import role_builder, service_of
from rftstream.runs.services import role_context
from rftstream.service.role import Role, RoleContext
from rftstream.service.role_spec import RoleSpec
from rftstream.service.service import Service
from rftstream.testing.memory_run import MemoryRun

MAX_TICKS = 100_000
TICK_S = 0.001
"""Least seconds of the clock that a tick takes."""


class RoleDriver:
    """One process of a role on a MemoryRun. A test makes it, and calls `work` or `tick`, `restart` or `stop`."""

    def __init__(
        self,
        run: MemoryRun,
        role: str | RoleSpec,
        *,
        process: str | None = None,
        build: Callable[[RoleContext], Role] | None = None,
    ) -> None:
        """Start the role. `role` is the name of a built-in role, or the declaration of your own. `build` composes the
        role instead of its declaration."""
        self.run = run
        self.role = role if isinstance(role, str) else role.name
        self.process = process or self.role
        if not isinstance(role, str):  # the positions of built-in roles are committed when a run is made
            run.transport().admin.commit_initial(role.name, role.positions)
        self._build = build or role_builder(role)
        self.service: Service = self._start()

    def _start(self) -> Service:
        context = role_context(
            config=self.run.config,
            folder=self.run.folder,
            clock=self.run.clock,
            transport=self.run.transport(self.process),
            process=self.process,
            simulated=True,
            own_store=self.run.store,
        )
        return service_of(self._build(context), context)

    def tick(self) -> float:
        """Do one slice of work. Return the seconds for which the role would idle now."""
        return self.service.tick()

    def work(self, *, within_s: float = 0.1) -> None:
        """Tick until the role is done, or would idle for longer than `within_s`. Shorter waits advance the clock."""
        for _ in range(MAX_TICKS):
            idle_s = self.tick()
            if self.service.done or idle_s > within_s:
                return
            self.run.clock.advance(max(idle_s, TICK_S))
        raise AssertionError(f"{self.process} does not come to rest: {self.service.health()}")

    @property
    def done(self) -> bool:
        """Return whether the role has ended by itself."""
        return self.service.done

    def restart(self) -> None:
        """Start the process again as after a SIGKILL. Only its records remain."""
        self.service = self._start()

    def stop(self) -> None:
        """End the process as after a SIGTERM: it finishes its work in progress, and leaves."""
        self.service.drain()
        while not self.service.done:
            self.run.clock.advance(max(self.tick(), TICK_S))
        self.service.close()
