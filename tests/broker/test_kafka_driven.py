"""What a real broker adds to the roles and to the commands that read and write a run: transactions whose markers take
offsets, groups that share partitions out, deletion, compaction. All roles are driven in this process."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from secrets import randbelow
from typing import Any

import pytest

import rftstream
from rftstream import faults, metrics
from rftstream.clock import SystemClock
from rftstream.contracts.rollouts import PartialRollout, Rollout
from rftstream.contracts.tasks import Task
from rftstream.contracts.versions import VersionName
from rftstream.errors import RftError, TransportError
from rftstream.integrations.exporter import FollowedRun
from rftstream.launch.display.watch import Watch
from rftstream.launch.health import Health
from rftstream.launch.sessions.replay_into import Replay
from rftstream.models.fake_renderer import FakeRenderer
from rftstream.models.spec import ModelSpec
from rftstream.policies.base import Completion, SampleRequest
from rftstream.policies.fake import FakePolicy
from rftstream.queries.curves.exported import Figures
from rftstream.roles.explorer.saved.partials import parse_key
from rftstream.roles.verifier import step as verifier_step
from rftstream.runs.folder import open_run
from rftstream.runs.observer import Observer
from rftstream.studio.access import StudioRole
from rftstream.studio.watched_run import WatchedRun
from rftstream.testing.foreign import ForeignWriter
from tests.broker.conftest import Made
from tests.broker.driven import Driven, DrivenRun
from tests.commands import called
from tests.e2e.test_bounds import COLUMNS, column, run_with
from tests.e2e.test_dead_and_rescore import BROKEN
from tests.e2e.test_resume import digests
from tests.e2e.workplace import RunView, Workplace, sets
from tests.unit.studio.studio_scene import client, rules

pytestmark = [pytest.mark.broker, pytest.mark.slow]

Make = Callable[..., DrivenRun]


@pytest.fixture
def make(place: Workplace, servers: str, run_id: Callable[[], str]) -> Iterator[Make]:
    """Make a run with these settings, whose roles end with the test."""
    made: list[DrivenRun] = []

    def make(*settings: str, text: str | None = None, more: str = "") -> DrivenRun:
        made.append(DrivenRun.make(place, run_id(), servers, *settings, text=text, more=more))
        return made[-1]

    yield make
    for run in made:
        run.close()


# ------------------------------------------------------------------------------------------------ a run that has ended


@pytest.fixture
def recorded(made: Made, servers: str) -> Path:
    """The folder of a whole run with two shares. Tests only read it."""

    def make(folder: Path) -> None:
        place = Workplace(folder)
        try:
            run = DrivenRun.make(place, "test-recorded", servers, "trainer.shares=2")
            assert run.to_the_end().version == 6
        finally:
            place.end()

    return made("kafka-run", make) / "runs" / "test-recorded"


@pytest.mark.heavy("a whole run on a real broker, whose transactions wait for one another")
@pytest.mark.law("replay")
def test_batches_are_trained_again_from_a_broker(place: Workplace, recorded: Path, run_id: Callable[[], str]) -> None:
    """Compared, and into a new run, there and on this machine."""
    source = place.view(recorded)
    compared = place.look("replay", recorded, "--json")
    assert compared.code == 0, compared.out
    assert (compared.result["equal"], compared.result["num_digests"]) == (True, 7)

    same = f"runs/{run_id()}"
    for into, begin, more in ((same, 0, ()), (f"runs/{run_id()}", 3, ("transport.kind=embedded",))):
        replay = Replay(open_run(recorded), place.folder / into, sets=more, first=begin)
        replay.prepare(lambda text: None)
        report = DrivenRun(place, into).to_the_end()
        assert (report.groups.admitted, report.groups.trained, report.version) == (12, 12, 6)
        assert digests(place.view(into)) == digests(source)
    again = place.look("replay", recorded, "--into", same, "--json")
    assert (again.code, again.result["reason"]) == (0, "steps"), again.err
    other = place.look("replay", recorded, "--into", same, *sets("trainer.lr=1"))
    assert other.code == 2
    assert "was begun with other settings: trainer.lr" in other.err


def test_commands_that_read_a_run(place: Workplace, recorded: Path) -> None:
    status = place.look("status", recorded, "--json").result
    assert (status["version"], status["state"]) == (6, "finished")
    for command in (
        ("audit", recorded), ("trace", recorded, "version:6"), ("inspect", recorded, "rollouts"),
        ("dead", "list", recorded), ("scale-plan", recorded),
    ):  # fmt: skip
        looked = place.look(*command)
        assert looked.code == 0, looked.err


def test_a_run_is_opened_by_its_id_and_the_address_of_its_log(
    recorded: Path, servers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (part := tmp_path / "part.toml").write_text(
        f'[run]\nname = "{recorded.name}"\n[transport]\nkind = "kafka"\nservers = "{servers}"\n'
    )
    assert called("audit", part) == called("audit", recorded), "the settings are those that stand on the log"
    with rftstream.open(recorded.name, servers=servers) as run, rftstream.open(recorded) as same:
        assert (run.id, run.state, run.summary["version"]) == (recorded.name, "finished", 6)
        assert run.rollouts(fate="trained").to_pandas().equals(same.rollouts(fate="trained").to_pandas())
        assert run.audit().to_json() == same.audit().to_json() and list(run.follow()) == []
        assert all(said for said in run.rollouts().to_pandas(["completion"])["completion"])
    with pytest.raises(rftstream.ConfigError, match=f"{recorded.name}s: no such run at .*{recorded.name}"):
        rftstream.open(f"{recorded.name}s", servers=servers)


# ------------------------------------------------------------------------------------------------ runs of their own


@pytest.mark.heavy("a whole run on a real broker, whose transactions wait for one another")
@pytest.mark.law("lost", "twice", "unscorable")
def test_the_dead_are_put_back_after_the_mend_and_scored_once_more(
    place: Workplace, make: Make, monkeypatch: pytest.MonkeyPatch, run_id: Callable[[], str]
) -> None:
    module = f"checks_{run_id()}".replace("-", "_")
    place.write(f"{module}.py", BROKEN)
    monkeypatch.syspath_prepend(str(place.folder))
    monkeypatch.setattr(verifier_step, "JUDGED_OVER", 24)
    run = make(f"tasksets.sums.reward={module}:score", "verifier.tries=1", "feeder.groups_per_batch=4")
    run.start_all()
    with pytest.raises(RftError, match="could not be scored") as stopped:
        run.play()
    assert stopped.value.exit_code == 6
    run.kill(next(one for one in run.workers if one.role == "verifier"))
    run.play(lambda: run.view.audit().groups.dead >= 4)
    run.close()
    before = run.view.assert_nothing_lost()

    place.write("mended", "")
    asked = place.look("dead", "retry", run.folder.path, "--all", "--json")
    assert asked.code == 0, asked.err
    assert len(asked.result["groups"]) == before.groups.dead
    assert asked.result["num_stored"] == before.rollouts.dead
    run.resume("run.steps=5")
    after = run.to_the_end()
    assert after.version == 5
    assert after.groups.dead >= before.groups.dead, "a few may have had no outcome yet when the run stopped"
    listed = place.look("dead", "list", run.folder.path, "--json")
    assert listed.result["num_groups"]["put_back"] == before.groups.dead

    into = f"runs/{run_id()}"
    scored = place.look("rescore", run.folder.path, "--reward", "exact", "--into", into, "--json")
    assert scored.code == 0, scored.err
    table = scored.result
    assert table["num_rollouts"] == after.rollouts.admitted - before.rollouts.dead, "once, by the names of now"
    assert (table["agreement"], table["unscorable_new"]) == (1.0, {})
    again = DrivenRun(place, into)
    again.resume("run.steps=2")
    assert again.to_the_end().version == 2
    names = {one.ids.rollout_id for one in run.view.rollouts() if isinstance(one, Rollout)}
    assert {one.ids.rollout_id for one in again.view.rollouts()} == names


@pytest.mark.sampled(1, "strays")
@pytest.mark.heavy("a whole run on a real broker, whose transactions wait for one another")
@pytest.mark.law("fencing")
def test_strays_in_a_live_run(make: Make) -> None:
    """Anybody may write to a broker, and records of a transaction do not stand next to each other there."""
    run = make("run.steps=100000")
    run.start_all()
    view, seed = run.view, randbelow(1 << 30)
    print(f"seed of the strays: {seed}")

    def play_on(count: int) -> None:
        version = view.curve().version + count
        run.play(lambda: view.curve().version >= version)

    play_on(2)
    writer, written = ForeignWriter(view.transport, view.folder.run_id, Random(seed)), set()
    for number in range(12):
        written.add(writer.write().partition(" ")[0])
        play_on(number % 6 == 5)
    assert len(written) > 2
    play_on(2)
    run.close()
    version = view.assert_nothing_lost(is_alone=False).version
    assert {one.reason for one in view.dead()} <= {"foreign", "undecodable"}
    writer.write()
    run.resume(f"run.steps={version + 2}")
    assert run.to_the_end(is_alone=False).version == version + 2


class DiedError(Exception):
    """What a role that dies here raises."""


@pytest.mark.sampled(1, "retention")
@pytest.mark.law("conservation", "bounded")
def test_a_run_with_retention_balances_and_goes_on(
    place: Workplace, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trainer dies between saying what goes and deleting it."""
    steps, said_at = 12, []

    def die_at(point: str, number: int | None = None) -> None:
        if point == "trim_said":
            said_at.append(point)
            if len(said_at) == 2:
                raise DiedError

    monkeypatch.setattr(faults, "at", die_at)
    run = make(f"run.steps={steps}", more="[retention]\n")
    run.start_all()
    with pytest.raises(DiedError):
        run.play()
    run.kill(next(one for one in run.workers if one.role == "trainer"))
    run.start("trainer")
    run.play()
    run.close()
    view = run.view
    said = view.control().deleted
    assert said.version == steps - 2
    assert said.sequence > 0
    for topic in ("tasks", "rollouts", "verified", "batches"):
        begins = sorted(view.transport.admin.begin_offsets(topic).items())
        assert tuple(offset for _, offset in begins) == said.offsets[topic]
        assert sum(said.offsets[topic]) > 0
    report = view.assert_nothing_lost()
    assert (report.groups.trained, report.deleted_groups) == (2 * steps, said.sequence)
    assert report.lengths["trained"].count == report.rollouts.trained
    run.resume(f"run.steps={steps + 2}")
    assert run.to_the_end().groups.trained == 2 * (steps + 2)
    assert f"--from {steps}" in place.look("replay", run.folder.path).err
    assert place.look("replay", run.folder.path, "--from", str(steps)).code == 0


LONG = """
[run]
name = "{name}"
steps = 1
[model]
path = "fake"
[tasksets.sums]
source = "arithmetic"
[sampling]
max_tokens = 100_000
[feeder]
groups_per_batch = 1
group_size = 2
[explorer]
policy = "fake"
count = 0
partial_every_s = 0.04
[trainer]
backend = "fake"
[policies.fake]
tokens_per_s = 500.0
mean_tokens = 600.0
sigma = 0.0
answer_depends_on = "task"
[transport]
partitions = 1
"""


def pieces_of(view: RunView) -> dict[str, list[PartialRollout]]:
    found: dict[str, list[PartialRollout]] = {}
    for message in view.messages("partials"):
        assert isinstance(message, PartialRollout)
        found.setdefault(message.ids.rollout_id, []).append(message)
    return found


def alone(task: Task, prompt: tuple[int, ...], num_tokens: int) -> Completion:
    """What an engine samples of the task that nobody disturbs."""
    settings = FakePolicy.Config(mean_tokens=float(num_tokens), sigma=0.0, answer_depends_on="task")
    spec = ModelSpec(name="fake", folder=None, dtype="float32", context=None)
    policy = FakePolicy(settings, model=spec, renderer=FakeRenderer(), clock=SystemClock())
    policy.load({}, VersionName(trainer_epoch=0, version=0))
    policy.submit(SampleRequest(request_id="alone", token_ids=prompt, sampling=task.sampling, seed=task.seed,
                                max_tokens=task.sampling.max_tokens))  # fmt: skip
    (completion,) = policy.step()
    return completion


@pytest.mark.law("lost", "twice")
def test_a_lost_explorers_rollouts_are_finished_by_another(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """From the pieces on the compacted topic, in the order of the partition."""
    num_tokens = 600
    run = make(text=LONG)
    first = run.start("explorer", "first")
    run.start_all("explorer")
    view = run.view

    def num_saved() -> int:
        return min((sum(one.num_tokens for one in own) for own in pieces_of(view).values()), default=0)

    run.play(lambda: num_saved() > num_tokens // 3)
    run.kill(first)
    saved = pieces_of(view)
    caplog.set_level(logging.INFO)
    run.start("explorer", "second")
    run.play()
    run.close()

    assert len(saved) == 2
    tasks = {one.ids.rollout_id: one for one in view.messages("tasks") if isinstance(one, Task)}
    for rollout in view.rollouts()[:2]:
        one, (whole,) = rollout.ids.rollout_id, rollout.segments
        before, after = saved[one], pieces_of(view)[one][len(saved[one]) :]
        assert ({piece.explorer for piece in before}, {piece.explorer for piece in after}) == ({"first"}, {"second"})
        assert f"{one}: goes on from {sum(piece.num_tokens for piece in before)} tokens" in caplog.text
        mask = whole.loss_mask.numpy() == 1
        prompt = tuple(whole.token_ids.numpy()[~mask].tolist())
        expected = alone(tasks[one], prompt, num_tokens)
        assert rollout.num_tokens == num_tokens
        assert whole.token_ids.numpy()[mask].tobytes() == expected.token_ids.tobytes()
        assert whole.behavior_logprobs.numpy()[mask].tobytes() == expected.behavior_logprobs.tobytes()
    live = {record.key: record.value for record in view.records("partials")}
    finished = {one.ids.rollout_id for one in view.rollouts()}
    left = {parse_key(key or b"")[0] for key, value in live.items() if value is not None}
    assert not left & finished, "no piece of what is finished is left"
    view.assert_nothing_lost()


PEOPLE = ("feedback.pairs=0.9", "feedback.quorum=1", "feedback.expires_s=100000", "run.steps=4")
PAGES = ("/groups", "/charts", "/versions/2", "/questions", "/dead", "?as_of=v2")


def test_pages_and_votes_of_the_studio(place: Workplace, make: Make) -> None:
    """Its numbers are those of the audit, and a vote given there is judged."""
    run = make(*PEOPLE)
    report, path = run.to_the_end(), run.folder.path
    name = run.folder.run_id
    watched = WatchedRun(name, lambda: open_run(path))
    watched.follow_once()
    with client([watched], rules(local_role=StudioRole.annotator)) as browser:

        def get(address: str) -> Any:
            answer = browser.get(address)
            assert answer.status_code == 200, answer.text
            return answer.json() if "json" in answer.headers["content-type"] else answer.text

        def vote(body: dict[str, Any]) -> Any:
            own = {"origin": "http://testserver"}
            return browser.post(f"/api/v1/runs/{name}/feedback", json=body, headers=own).json()

        shown = get(f"/api/v1/runs/{name}")
        assert shown["version"] == report.version == 4
        for what in ("groups", "rollouts"):
            counts = getattr(report, what)
            assert all(
                shown[what][fate] == getattr(counts, fate) for fate in ("trained", "filtered", "dead", "pending")
            )
        for address in PAGES:
            assert "<h1" in get(f"/runs/{name}{address}"), address
        asked = get(f"/api/v1/runs/{name}/questions")["questions"][0]
        body = {"rollouts": asked["rollouts"], "choice": "first", "order": asked["order"]}
        assert vote(body)["written"]
        assert not vote(body)["written"], "the same again"
        run.resume("run.steps=6")
        assert run.to_the_end().version == 6
        judged = {one["question_id"]: one for one in place.look("feedback", "judgements", path, "--json").result}
        assert judged[asked["question_id"]]["recorded"]
        watched.follow_once()
        assert get(f"/api/v1/runs/{name}")["version"] == 6
    watched.stop()


@pytest.mark.sampled(1)
@pytest.mark.heavy("two whole runs on a real broker, whose transactions wait for one another")
@pytest.mark.law("bounded", "conservation")
@pytest.mark.parametrize("number", [0, *(pytest.param(one, marks=pytest.mark.long) for one in (1, 2)), 3], ids=COLUMNS)
def test_all_bounds_at_once(place: Workplace, servers: str, run_id: Callable[[], str], number: int) -> None:
    values = column(number)
    partitions = min(33, values["transport.partitions"])  # a small broker takes long to make a thousand of them
    run_with(place, {**values, "transport.partitions": partitions}, run_id(), servers)


@pytest.mark.law("bounded", "conservation")
def test_open_groups_are_read_again_from_the_log_once_their_bodies_are_too_many(make: Make) -> None:
    """The buffer holds no body at all. Whoever looks on sees completions, too."""
    run = make("buffer.max_body_bytes=1")
    with closing(open_run(run.folder.path).transport) as transport:
        watch = Watch(run.config, transport, Observer(transport), (), folder=run.folder)

        def is_shown() -> bool:
            watch.look()
            return watch.sample is not None

        run.start_all()
        run.play(is_shown)
        run.play()
        run.close()
    assert run.view.assert_nothing_lost().version == 6


@pytest.mark.law("lost", "never-waits")
def test_a_step_that_takes_longer_than_a_session_is_not_begun_anew(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Six rollouts of 100,000 tokens are finished in one step, which takes seconds."""
    caplog.set_level(logging.WARNING, "rftstream.transport.kafka.member")
    run = make(
        "run.steps=1", "transport.session_timeout_s=2", "feeder.max_staleness=0", "sampling.max_tokens=4000000",
        "policies.fake.mean_tokens=100000", "policies.fake.sigma=0",
    )  # fmt: skip
    assert run.to_the_end().version == 1
    assert "explorer-1 was put out of the group" not in caplog.text


BACKLOG = 12
"""Rollouts of (1 + max_staleness) batches: so many are admitted while nobody trains."""


@pytest.mark.sampled(1, "exporter")
@pytest.mark.law("conservation")
def test_backlog_and_lag_count_no_markers_of_transactions(place: Workplace, make: Make) -> None:
    """The exporter's backlog is that of the audit, with workers and without. Two verifiers share the work."""
    run = make("verifier.max_concurrent=5")
    path = run.folder.path
    followed = FollowedRun(run.folder.run_id, lambda: open_run(path), every_s=1.0, health=Health())
    followed.follow_once()
    assert not followed.figures["rftstream_backlog_rollouts"], "there is nothing yet"

    first = [run.start(role) for role in ("feeder", "explorer", "trainer")]
    run.play(lambda: len(run.view.rollouts()) == BACKLOG)
    for worker in first:
        run.stop(worker)
    followed.follow_once()
    assert_as_audited(place, path, followed.figures)
    assert value(followed.figures, "rftstream_backlog_rollouts", "verifier") == BACKLOG
    assert value(followed.figures, "rftstream_backlog_rollouts", "explorer") == 0
    assert value(followed.figures, "rftstream_workers_wanted", "verifier") == 3
    assert value(followed.figures, "rftstream_run_oldest_open_timestamp_seconds") > 0
    explorer, verifier = place.look("scale-plan", path, "--json").result
    assert (explorer["wanted"], verifier["wanted"]) == (0, 3)
    assert verifier == {"role": "verifier", "backlog": BACKLOG, "max_concurrent": 5, "most": 4, "wanted": 3}

    verifiers = [run.start("verifier") for _ in range(2)]
    run.play(lambda: len(run.view.verified()) == BACKLOG)
    # Its end of the log is a marker. A partition that is just going over to the other one has no position.
    run.play(lambda: sum(map(lag_of, verifiers)) == 0)
    run.start_all("verifier")
    run.play()
    run.close()
    followed.follow_once()
    assert value(followed.figures, "rftstream_run_state", "finished") == 1
    assert_as_audited(place, path, followed.figures)
    assert (
        value(followed.figures, "rftstream_run_version") == value(followed.figures, "rftstream_run_steps_planned") == 6
    )
    followed._close()


def lag_of(verifier: Driven) -> float:
    try:
        verifier.service.measure()
    except TransportError:
        return math.inf
    return float(metrics.LAG.labels("verifier", "rollouts")._value.get())


def value(figures: Figures, name: str, *labels: str) -> float:
    return dict(figures[name])[labels]


def assert_as_audited(place: Workplace, path: Path, figures: Figures) -> None:
    rollouts = place.look("audit", path, "--json").result["rollouts"]
    stages = zip(("explorer", "verifier", "buffer", "trainer"), rollouts["pending_by_stage"].values(), strict=True)
    for role, count in stages:
        assert value(figures, "rftstream_backlog_rollouts", role) == count, role
    assert value(figures, "rftstream_run_rollouts_admitted_total") == rollouts["admitted"]
    for result in ("trained", "expired", "filtered", "dead"):
        assert value(figures, "rftstream_run_rollouts_total", result) == rollouts[result]
