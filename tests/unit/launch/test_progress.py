"""What people see of a run, read from its log."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TextIO, cast

import pytest
from rich.console import Console

from rftstream.contracts import codec
from rftstream.contracts.control import DesiredState, RunState
from rftstream.contracts.ids import group_id, rollout_id
from rftstream.contracts.messages import Message
from rftstream.contracts.outcomes import GroupOutcome, GroupResult
from rftstream.contracts.rollouts import Rollout, RolloutStatus, Turn
from rftstream.contracts.tasks import ChatMessage, Problem, RolloutIds, Sampling
from rftstream.contracts.verdicts import Verdict, VerifiedRollout
from rftstream.contracts.versions import EvalResult, StepRecord, VersionName
from rftstream.launch.display import progress, progress_text
from rftstream.launch.display.live_progress import LiveProgress, live_view
from rftstream.launch.display.phases import find_phases
from rftstream.launch.display.progress_text import SPARKLINE_WIDTH, rate_parts, sparkline, status_line
from rftstream.launch.display.watch import Watch
from rftstream.launch.processes import WorkerCommand
from rftstream.launch.supervisor import Slot
from rftstream.queries.formatting import duration
from rftstream.runs.folder import RunFolder, create_log
from rftstream.runs.observer import FIRST_STEPS, Curve, Observer
from rftstream.runs.studio_address import find_address, noted_address
from rftstream.testing.played import played_records
from rftstream.transport.base import Transport
from rftstream.transport.embedded.transport import EmbeddedTransport
from tests.configs import small_run
from tests.contracts.samples import ROLLOUT
from tests.suite.each import each


def step(version: int, reward: float | None = None, *, epoch: int = 1, resumed: bool = False) -> StepRecord:
    metrics = {"rollouts": 8.0, "tokens": 64.0, "staleness_mean": 1.5, "loss": 0.25}
    return StepRecord(
        name=VersionName(trainer_epoch=epoch, version=version), batch_sequence=None if resumed else version - 1,
        positions=(0,), trained_groups=version, trained_rollouts=8 * version, weights_digest=None, resumed=resumed,
        metrics=metrics if reward is None else {**metrics, "reward": reward}, recorded_at=1000.0 + version,
    )  # fmt: skip


def evaluation(mean: float, num_unscored: int = 0, *, version: int = 2, epoch: int = 1) -> EvalResult:
    return EvalResult(
        evaluation="held", name=VersionName(trainer_epoch=epoch, version=version), num_tasks=4, num_samples=1,
        num_unscored=num_unscored,
        metrics={"mean": mean, "pass@1": mean, "length_mean": 3.0}, generations=None, best=True,
    )  # fmt: skip


def verified() -> VerifiedRollout:
    group = group_id("sums", 0, 0, 0)
    ids = RolloutIds(rollout_id=rollout_id(group, 0), group_id=group, taskset="sums", sibling=0, group_size=1,
                     sequence=0, min_version=0)  # fmt: skip
    rollout = Rollout(
        ids=ids, status=RolloutStatus.completed, num_tokens=0, segments=(), sampling=Sampling(),
        problem=Problem(messages=(ChatMessage(role="user", content="1+1="),)),
        turns=(Turn(role="assistant", content="[bold]2\nis it"),),
    )  # fmt: skip
    return VerifiedRollout(ids=ids, rollout=rollout, verdict=Verdict(reward=1.0, scorer="exact", scorer_version="1"))


class Scene:
    def __init__(self, transport: Transport, folder: Path) -> None:
        self.config = small_run(run={"name": "r", "steps": 10}, transport={"partitions": 2})
        create_log(transport, self.config)
        self._transport = transport
        self.observer = Observer(transport)
        self.slots = [Slot("trainer", WorkerCommand(process="trainer-0", arguments=(), log=Path("x")))]
        self.watch = Watch(self.config, transport, self.observer, self.slots, folder=RunFolder(folder / "r"))
        self._producer = transport.producer("test")
        self._producer.start()

    def publish(self, topic: str, *messages: Message) -> None:
        self._producer.commit(played_records(self._transport, "r", [(topic, 0, message) for message in messages]))


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    transport = EmbeddedTransport(tmp_path / "log")
    yield Scene(transport, tmp_path)
    transport.close()


# ------------------------------------------------------------------------------------------------ the curve


def test_first_and_last_are_means_over_a_tenth_of_the_steps() -> None:
    curve = Curve()
    assert curve.reward_first() is None
    for version in range(1, 21):
        assert curve.absorb(step(version, version / 100))
    assert curve.reward_first() == pytest.approx((0.01 + 0.02) / 2)
    assert curve.reward_last() == pytest.approx((0.19 + 0.20) / 2)
    assert (curve.version, curve.num_steps) == (20, 20)


def test_steps_without_a_reward_count_as_steps_only() -> None:
    curve = Curve()
    for version, reward in ((1, None), (2, 0.5), (3, float("nan"))):
        curve.absorb(step(version, reward))
    assert curve.num_steps == 3
    assert curve.reward_first() == curve.reward_last() == 0.5
    assert curve.rewards() == [0.5]


def test_the_first_rewards_come_after_a_long_stage_of_demonstrations() -> None:
    curve = Curve()
    for version in range(1, FIRST_STEPS + 51):
        curve.absorb(step(version, None))
    for version in range(FIRST_STEPS + 51, FIRST_STEPS + 501):
        curve.absorb(step(version, version / 1000))
    first = (FIRST_STEPS + 51 + FIRST_STEPS + 110) / 2000
    assert curve.num_steps // 10 == 60
    assert curve.reward_first() == pytest.approx(first)
    curve.pass_over([], VersionName(trainer_epoch=1, version=5_000))
    curve.absorb(step(5_001, 1.0))
    assert curve.reward_first() == pytest.approx((FIRST_STEPS + 51 + FIRST_STEPS + 150) / 2000), "not that of now"


def test_a_result_that_was_asked_for_later_is_not_the_newest(scene: Scene) -> None:
    def ends() -> list[int]:
        scene.observer.catch_up()
        return [one.name.version for one in scene.observer.evaluations["held"]]

    scene.publish("evals", *(evaluation(version / 10, version=version) for version in (2, 4, 3)))
    assert ends() == [2, 4], "also of versions whose steps are read later"
    scene.publish("steps", *map(step, (1, 2, 3, 4)))
    scene.publish("evals", evaluation(0.0, version=0))
    assert ends() == [0, 4]
    scene.publish("steps", step(2, epoch=2, resumed=True), step(3, epoch=2))
    scene.publish("evals", evaluation(0.8, version=3, epoch=2))
    assert ends() == [0, 3], "version 4 is not in force any more"


def test_only_steps_in_force_count() -> None:
    curve = Curve()
    for version in (1, 2, 3):
        curve.absorb(step(version, 0.1))
    assert not curve.absorb(step(1, epoch=2, resumed=True))
    assert curve.version == 1
    assert curve.absorb(step(2, 0.9, epoch=2))
    assert not curve.absorb(step(3, 0.1, epoch=1)), "a zombie's"
    assert curve.rewards() == [0.1, 0.9]
    assert [one.name.version for one in curve.recent] == [1, 2]


# ------------------------------------------------------------------------------------------------ the views


@each(
    ("lags", "num_loaded", "version", "expected"),
    [
        ({}, 2, 0, ["loading 2 of 6 workers", "training step 0 of 10"]),
        ({"tasks": 12}, None, 0, ["sampling 0 of 12 rollouts on their way", "training step 0 of 10"]),
        (
            {"tasks": 1, "rollouts": 3, "verified": 8},
            None,
            4,
            [
                "sampling 11 of 12 rollouts on their way",
                "scoring 8 of 11 sampled ones",
                "training step 4 of 10",
                "publishing version 4",
            ],
        ),
        ({"tasks": 0, "rollouts": 0, "verified": 0}, None, 10, ["training step 10 of 10", "publishing version 10"]),
    ],
)
def test_phases(lags: dict[str, int], num_loaded: int | None, version: int, expected: list[str]) -> None:
    curve = Curve()
    for number in range(1, version + 1):
        curve.absorb(replace(step(number, 0.5), weights_digest="sha256:0"))
    found = find_phases(curve, lags, steps=10, workers=6, num_loaded=num_loaded)
    assert [f"{phase.name} {phase.text}" for phase in found] == expected


@each(
    "rollouts, expected",
    [
        (4, ["scoring 8 of 12 sampled ones", "training step 0 of 10"]),
        (0, ["batching 8 recorded rollouts left", "training step 0 of 10"]),
    ],
)
def test_nobody_samples_where_another_run_did(rollouts: int, expected: list[str]) -> None:
    lags = {"tasks": 0, "rollouts": rollouts, "verified": 8}
    found = find_phases(Curve(), lags, steps=10, workers=6, num_loaded=None, imported=True)
    assert [f"{phase.name} {phase.text}" for phase in found] == expected


def test_code_that_is_edited_while_the_run_goes_on_is_said_once(scene: Scene, tmp_path: Path) -> None:
    reward, folder = tmp_path / "my_reward.py", RunFolder(tmp_path / "r")
    folder.modules_file.parent.mkdir(exist_ok=True)
    folder.modules_file.write_text(json.dumps({"my_reward": {"file": str(reward), "sha256": sha256(b"a").hexdigest()}}))
    out = io.StringIO()
    view = progress.PlainProgress(scene.watch, out)
    for code, times in ((b"a", 0), (b"b", 1), (b"b", 1), (b"a", 1), (b"c", 2)):
        reward.write_bytes(code)
        scene.watch._lag_at = view._next_at = 0.0
        view.update(scene.observer.poll())
        told = [line for line in out.getvalue().splitlines() if line.startswith("edited: my_reward in ")]
        assert len(told) == times and all("`rftstream resume` take it" in line for line in told)
        assert ("my_reward in " in live_text(scene)) == (code != b"a")


def test_a_sample_is_shown_once_and_an_open_studio_is_named(scene: Scene) -> None:
    out = io.StringIO()
    view = progress.PlainProgress(scene.watch, out)
    scene.publish("verified", verified())
    scene.watch.look()  # what a resumed run already had is not told as news
    scene.watch._sample_at = 0.0
    scene.watch.look()
    assert scene.watch.sample is None
    scene.publish("verified", verified())
    folder = RunFolder(scene.watch._folder.path)
    folder.path.mkdir()
    with noted_address([folder], "http://127.0.0.1:1/"):
        for _ in range(3):
            scene.watch._sample_at = scene.watch._lag_at = view._next_at = 0.0
            view.update(scene.observer.poll())
    assert find_address(folder) is None, "it is closed"
    told = out.getvalue().splitlines()
    assert [line.partition(" ")[0] for line in told] == ["step", "studio:", "sample"]
    assert told[1] == "studio: http://127.0.0.1:1/"


def test_sparkline() -> None:
    assert sparkline([]) == ""
    assert sparkline([1, 1, 1]) == "▁▁▁"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], width=2) == "▁█"
    assert len(sparkline([0.5] * 1000)) == SPARKLINE_WIDTH


@pytest.mark.parametrize(("seconds", "text"), [(5.4, "5 s"), (65, "1 min 05 s"), (3725, "1 h 02 min")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds, exact=True) == text


def test_plain_lines(scene: Scene) -> None:
    out = io.StringIO()
    view = progress.PlainProgress(scene.watch, out)
    view.update(scene.observer.poll())
    scene.publish("steps", *(step(version, version / 10) for version in (1, 2, 3)))
    scene.publish("evals", evaluation(0.25), evaluation(1.0, num_unscored=3))
    view.update(scene.observer.poll())
    view.note("trainer-0 ended")
    view.close()
    assert out.getvalue().splitlines() == [
        "step 0/10  loading 0 of 1 workers",
        "evaluation held of version 2: mean 0.250  pass@1 0.250  of 4 problems  (best so far)",
        "evaluation held of version 2: mean 1.000  pass@1 1.000  of 4 problems  "
        "(3 of 4 samples unscored)  (best so far)",
        "trainer-0 ended",
        "step 3/10  reward 0.300  staleness 1.5  loss 0.2500  8 rollouts/s  64 trained tokens/s  "
        "60.0 steps/min  7 s left",
    ]


def test_a_trainer_that_goes_back_is_told(scene: Scene) -> None:
    out = io.StringIO()
    view = progress.PlainProgress(scene.watch, out)
    for steps in ([step(1, 0.1), step(2, 0.2), step(3, 0.3)], [step(1, resumed=True, epoch=2), step(2, 0.2, epoch=2)]):
        scene.publish("steps", *steps)
        view._next_at = 0.0
        view.update(scene.observer.poll())
    back, line = out.getvalue().splitlines()[-2:]
    assert back == "from the newest checkpoint: batches up to version 3 are trained again"
    assert line.startswith("step 2/10")


def test_groups_that_are_filtered_before_the_first_step_are_said(scene: Scene) -> None:
    many = progress_text.MANY_BATCHES * scene.config.feeder.groups_per_batch + 1
    for sequence in range(many):
        assert "decided" not in status_line(scene.watch)
        scene.publish("outcomes", GroupOutcome(
            group_id=group_id("sums", 0, sequence, 0), taskset="sums", sequence=sequence, result=GroupResult.filtered,
            reason="zero_variance", rollouts=()))  # fmt: skip
        scene.watch._lag_at = 0.0
        scene.watch.look()
    said = f"step 0/10  some {many:,} groups decided and none trained yet: `rftstream status "
    assert status_line(scene.watch).startswith(said)
    scene.watch.config = small_run(run={"name": "demo", "steps": 10, "imported_from": "/runs/a"})
    assert "decided" not in status_line(scene.watch), "it decides about all that it took over before it trains"


def test_steps_without_signal_are_said(scene: Scene) -> None:
    flat = {"reward": 0.0, "reward_std": 0.0, "steps_without_signal": 12.0}
    scene.publish("steps", replace(step(1), metrics=flat))
    scene.watch.absorb(scene.observer.poll())
    assert "reward 0.000  no signal for 12 steps" in status_line(scene.watch)
    assert "no signal for 12 steps: every reward is 0. Likely causes" in live_text(scene)


def test_signs_are_said_once_and_shown(scene: Scene) -> None:
    out = io.StringIO()
    view = progress.PlainProgress(scene.watch, out)
    said = "83% of the newest completions are cut off by sampling.max_tokens or model.context"
    for version in range(1, progress.SIGNS_AFTER_STEPS + 3):
        cut = {"reward": 0.1, "truncated_share": 0.83}
        scene.publish("steps", replace(step(version), metrics=cut))
        scene.watch._lag_at = view._next_at = 0.0
        view.update(scene.observer.poll())
        told = [line for line in out.getvalue().splitlines() if said in line]
        assert told == ([f"look at completions: {said}"] if version >= progress.SIGNS_AFTER_STEPS else [])
        assert f"completions: {said}" in live_text(scene), "from the first step on"


def test_a_canary_that_earns_is_said_while_the_run_goes_on(scene: Scene) -> None:
    out = io.StringIO()
    scene.watch.config = small_run(evaluations={"held": {"source": "arithmetic", "canary": True}})
    view = progress.PlainProgress(scene.watch, out)
    for version in range(1, progress.SIGNS_AFTER_STEPS + 1):
        scene.publish("steps", step(version, 0.1))
    for version, mean in ((0, 0.0), (2, 0.5)):
        scene.publish("evals", evaluation(mean, version=version))
    scene.watch._lag_at = view._next_at = 0.0
    view.update(scene.observer.poll())
    said = next(line for line in out.getvalue().splitlines() if line.startswith("look at held: 0.50 of the reward is "))
    assert "`rftstream studio " in said and "studio RUN`" not in said


def test_a_taskset_whose_rollouts_fail_is_named_once(scene: Scene) -> None:
    out = io.StringIO()
    view = progress.PlainProgress(scene.watch, out)
    for number in range(8):
        scene.publish("rollouts", replace(ROLLOUT, status=RolloutStatus.failed, error=f"KeyError: {number}"))
        scene.watch._trouble_at = view._next_at = 0.0
        view.update(scene.observer.poll())
    said = f"4 of the newest 4 rollouts of {ROLLOUT.ids.taskset} failed: KeyError: 3"
    assert [line for line in out.getvalue().splitlines() if "failed" in line] == [said]
    assert "8 of the newest 8 rollouts" in live_text(scene)


def live_text(scene: Scene) -> str:
    console = Console(file=io.StringIO(), width=1000, force_terminal=False)
    with console.capture() as capture:
        console.print(live_view(scene.watch, 1000))
    return capture.get()


def test_a_run_that_stands_still_says_for_what_it_waits(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    view = progress.PlainProgress(scene.watch, out)
    scene.publish("verified", verified())
    now = time.time()

    def minutes_later(minutes: float) -> str:
        """What is printed when so much time has passed since the beginning."""
        monkeypatch.setattr(time, "time", lambda: now + 60 * minutes)
        scene.watch._trouble_at = scene.watch._lag_at = view._next_at = 0.0
        before = len(out.getvalue())
        view.update(scene.observer.poll())
        return out.getvalue()[before:]

    assert "nothing has moved" not in minutes_later(2)
    said = "nothing has moved for 4 min: 1 verified rollout waits for the buffer, and no buffer is alive"
    assert said in minutes_later(4.5)
    assert said in live_text(scene)
    assert minutes_later(6) == ""
    assert "nothing has moved for 9 min" in minutes_later(9.5)
    scene.publish("control", RunState(state=DesiredState.paused, by="me", reason="lunch"))
    paused = f"paused by me (lunch): `rftstream unpause {scene.watch._folder.path}` goes on"
    assert minutes_later(30) == f"{paused}\n"
    assert minutes_later(30) == ""
    assert paused in live_text(scene)
    assert scene.watch.standstill is None
    scene.publish("control", RunState(state=DesiredState.running, by="me", reason=""))
    assert minutes_later(31) == "not paused any more\n", "it was not to move until now"


def test_a_step_that_takes_minutes_has_rates_too_but_none_from_before_the_run_was_resumed(scene: Scene) -> None:
    began = scene.watch._moving_since
    times = (began - 30, began + 10, began + 210)
    for version, at in enumerate(times, start=1):
        scene.publish("steps", replace(step(version, 0.5), recorded_at=at))
        scene.observer.poll()
        if version < 3:
            assert scene.watch.seconds_left() is None, "one step since it goes on"
    assert scene.watch.seconds_left() == pytest.approx(7 * 200)
    assert (rates := scene.watch.rates()) is not None
    assert rate_parts(rates) == ["0.04 rollouts/s", "0.32 trained tokens/s", "0.3 steps/min"], "none is 0"
    scene.publish("steps", *(replace(step(v, 0.5), recorded_at=began + 210 + v) for v in range(4, 10)))
    scene.observer.poll()
    assert scene.watch.seconds_left() == pytest.approx(1.0, abs=0.5), "the fast ones of the last minute"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: began + 219 + 40)
        assert scene.watch.seconds_left() is None, "this one takes far longer"


def test_the_live_view_shows_everything(scene: Scene) -> None:
    scene.publish("steps", *(step(version, version / 10) for version in (1, 2, 3)))
    scene.publish("evals", evaluation(0.25))
    scene.watch.look()
    scene.publish("verified", verified())
    scene.slots[0].state, scene.slots[0].restarts = "to start", 2
    scene.watch.absorb(scene.observer.poll())
    scene.watch._sample_at = scene.watch._lag_at = 0.0
    scene.watch.look()
    console = Console(file=io.StringIO(), width=140, force_terminal=False)
    with console.capture() as capture:
        console.print(live_view(scene.watch))
    text = capture.get()
    for part in ("step 3 of 10", "7 s left", "0.300 ▁▅█", "staleness 1.5", "8 rollouts/s", "scoring",
                 "1 of 1 sampled ones", "held of version 2: mean 0.250", "trainer-0 to start (2 restarts)",
                 "(reward 1): '1+1=' -> '[bold]2↵is it'"):  # fmt: skip
        assert part in text


@pytest.mark.parametrize("width", [40, 60, 80])
def test_the_live_view_fits_a_narrow_terminal(scene: Scene, width: int) -> None:
    scene.publish("steps", *(step(version, version / 10) for version in range(1, 4)))
    scene.watch.absorb(scene.observer.poll())
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(live_view(scene.watch, width))
    first, bar, *rest = capture.get().splitlines()
    assert first.rstrip().endswith("7 s left")
    assert "━" in bar and bar.rstrip().endswith("step 3 of 10")
    assert any("0.300 ▁▅█" in line for line in rest)


def test_looking_is_cheap_and_survives_what_cannot_be_read(scene: Scene) -> None:
    scene.publish("verified", verified())
    record = codec.to_record(verified(), "verified", 0, run="r")
    scene._producer.commit([type(record)("verified", 0, b"k", b"\xc1 not msgpack", record.headers)])
    scene.watch._sample_at = 0.0
    scene.watch.look()
    assert scene.watch.sample is None
    assert scene.watch.lags["verified"] == 2


def test_auto_is_plain_without_a_terminal(scene: Scene) -> None:
    assert isinstance(progress.open_progress("auto", scene.watch, io.StringIO()), progress.PlainProgress)
    assert isinstance(progress.open_progress("none", scene.watch, io.StringIO()), progress.NoProgress)


def test_live_in_a_terminal(scene: Scene) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    view = progress.open_progress("auto", scene.watch, out)
    assert isinstance(view, LiveProgress)
    view.update([])
    view.note("[red]trainer-0 ended")
    view.close()
    assert "[red]trainer-0 ended" in out.getvalue()


@pytest.mark.parametrize("kind", ["live", "plain", "none"])
def test_nobody_who_looks_on_ends_no_run(scene: Scene, kind: str) -> None:
    said: list[str] = []
    read, write = os.pipe()
    os.close(read)
    stream = io.TextIOWrapper(io.FileIO(write, "w"), encoding="utf-8", write_through=True)
    shown = progress.open_progress(kind, scene.watch, cast(TextIO, progress.Onlooker(stream, said.append)))
    scene.publish("steps", step(1, 0.25))
    shown.update(scene.observer.poll())
    shown.note("stopping")
    shown.note("ended")
    shown.close()
    stream.close()
    assert said == ["progress cannot be shown: Broken pipe; the run goes on, `rftstream status` shows it"]
