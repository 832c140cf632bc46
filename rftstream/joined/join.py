"""The door for own loops: which run, and which role."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from rftstream.backends.joined import TrainerDesk
from rftstream.config import loader
from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import BackendSpec, RewardSpec
from rftstream.config.parts.reward_uses import reward_uses
from rftstream.config.sections import RunConfig
from rftstream.contracts.role_names import RoleName
from rftstream.desk import Desk
from rftstream.errors import ConfigError
from rftstream.joined.explorer import JoinedExplorer
from rftstream.joined.ranks import RankTrainer, check_alone
from rftstream.joined.trainer import JoinedTrainer
from rftstream.joined.verifier import JoinedVerifier
from rftstream.joined.worker import RoleThread
from rftstream.policies.joined import SamplerDesk
from rftstream.preflight.plan import Purpose, plan
from rftstream.runs.folder import RunFolder, find_run, open_transport
from rftstream.service.control_view import read_control

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ROLES = tuple(name.value for name in (RoleName.explorer, RoleName.trainer, RoleName.verifier))
"""Roles that a loop can join as."""


@overload
def join(run: str | Path, role: Literal["explorer"], *, weights: bool = True) -> JoinedExplorer: ...


@overload
def join(run: str | Path, role: Literal["trainer"], *, group: ProcessGroup | None = None) -> JoinedTrainer: ...


@overload
def join(run: str | Path, role: Literal["verifier"]) -> JoinedVerifier: ...


def join(
    run: str | Path, role: str, *, weights: bool = True, group: ProcessGroup | None = None
) -> JoinedExplorer | JoinedTrainer | JoinedVerifier:
    """Join a run with a loop of your own. `run` is a run folder or a run file, as in the commands.

    `role`: "explorer" for a sampler, "trainer" for a training loop, "verifier" for a scorer. Return an object for a
    `with` block, whose docstring has the loop.

    `weights=False` is for a sampler whose weights are not the run's, such as an API; no version is written for it then.

    `group` is for a training loop on several processes, which all call it: their process group. Each makes the same
    calls in the same order, and hands in its shards; `state` and `kept` are whole on all of them.

    ConfigError if there is no such run, or if it has ended."""
    if group is not None:
        if role != RoleName.trainer:
            raise ConfigError(f"group: got one for the role {role!r}, expected it for 'trainer'; leave it out")
        return RankTrainer(group, lambda: _join_trainer(run))
    if role == RoleName.trainer:
        check_alone()
        return _join_trainer(run)
    folder, config = find_run(run)
    if role not in ROLES:
        raise ConfigError(f"role: got {role!r}, expected one of {', '.join(ROLES)}")
    _check_open(config, folder, role)
    if role == RoleName.explorer:
        desk = SamplerDesk(folders=weights)
        config = loader.replace(config, explorer__policy="joined", explorer__devices=("cpu",))
        return JoinedExplorer(desk, _start(role, config, folder, desk))
    check_scored_alone(config)
    scorer_desk = Desk()
    return JoinedVerifier(scorer_desk, _start(role, config, folder, scorer_desk))


def _join_trainer(run: str | Path) -> JoinedTrainer:
    folder, config = find_run(run)
    _check_open(config, folder, RoleName.trainer)
    if not registry.find_spec(BackendSpec, config.trainer.backend).is_joined:
        raise ConfigError(
            f"trainer.backend: {folder.run_id} is trained by {config.trainer.backend!r}, expected 'joined' for a "
            "loop of your own; say so in the run file, or by `rftstream resume RUN --set trainer.backend=joined`"
        )
    desk = TrainerDesk()
    config = loader.replace(config, trainer__device="cpu")
    return JoinedTrainer(desk, _start(RoleName.trainer, config, folder, desk))


def _start(role: str, config: RunConfig, folder: RunFolder, desk: Desk) -> RoleThread:
    thread = RoleThread(role, plan(config, Purpose.join).config, folder, desk)
    thread.start()
    return thread


def check_scored_alone(config: RunConfig) -> None:
    """Raise ConfigError if the reward of a taskset compares siblings, which a joined verifier gets one by one."""
    for name, section in config.tasksets.items():
        for use in reward_uses(section.reward, where := f"tasksets.{name}.reward"):
            if use.group or registry.find_spec(RewardSpec, use.name).group:
                raise ConfigError(
                    f"{where}: {use.name!r} compares all rollouts of a group, expected rewards that score each alone: "
                    "a joined verifier gets one rollout after the other; leave such tasksets to verifiers of rftstream"
                )


def _check_open(config: RunConfig, folder: RunFolder, role: str) -> None:
    """Raise ConfigError if the run has ended."""
    with closing(open_transport(config, folder, create=False, user=role)) as transport:
        finished = read_control(transport).finished
    if finished is not None:
        raise ConfigError(
            f"{folder.run_id}: the run has ended ({finished.reason}) with version {finished.name.version}, expected "
            "one that goes on; `rftstream resume` with more steps continues it"
        )
