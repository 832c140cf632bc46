"""Two workers of the role share its topic beside a whole run, and are killed now and then."""

from __future__ import annotations

from pathlib import Path

from my_roles import LENGTHS

from rftstream.config.loader import load
from rftstream.contracts.feedback import Feedback
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.testing import Faults, Simulation

RUN_FILE = Path(__file__).with_name("own_parts.toml")


def test_each_rollout_is_judged_once(tmp_path: Path) -> None:
    faults = Faults(roles=(LENGTHS.name,), share=0.2, kills=2)
    run = Simulation(load([RUN_FILE]), folder=tmp_path, seed=7, faults=faults, restart_s=0.001, roles=[LENGTHS])
    run.run()
    verified = {one.ids.rollout_id for one in run.messages("verified") if isinstance(one, VerifiedRollout)}
    judged = [one.rollout_id for one in run.messages("feedback") if isinstance(one, Feedback)]
    assert judged
    assert len(set(judged)) == len(judged)
    assert set(judged) <= verified  # workers leave when the run is finished, with the last ones perhaps not judged
