"""What no run could start with is refused before it, by `check`, `run` and `doctor` alike; errors are told apart into
permanent and passing ones."""

from __future__ import annotations

import errno
import importlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rftstream
from rftstream import errors
from rftstream.config import loader
from rftstream.config.sections import MakeModel, RunConfig
from rftstream.errors import ConfigError, RftError, StoreRefused, StoreUnreachable, exit_code_of
from rftstream.launch.result import RunResult
from rftstream.launch.session import RunSession
from rftstream.launch.session_options import SessionOptions
from rftstream.models.devices import check_device
from rftstream.models.folders.folder import check_complete, prepare_model
from rftstream.preflight.checks.check import check
from rftstream.preflight.doctor import examine
from rftstream.preflight.plan import Purpose, plan
from rftstream.runs.folder import RunFolder
from rftstream.transport.findings import Level
from rftstream.weights.stores.store import ObjectStore
from tests.configs import small_run
from tests.loopback import taken_port
from tests.suite.each import each
from tests.unit.tiny import make

GPU = "cuda:99"
"""No machine has so many."""


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return small_run(
        base=str(tmp_path), run={"name": "tiny", "steps": 2}, explorer={"policy": "fake"}, trainer={"backend": "fake"},
    )  # fmt: skip


@pytest.fixture
def without_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [one for one in os.environ if one.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An address where nobody answers, as the place of S3."""
    with taken_port() as port:
        url = f"http://127.0.0.1:{port}"
        for name, value in {"ENDPOINT_URL": url, "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        yield url


def refused_by_all(config: RunConfig, said: str) -> None:
    """`run` raises it before anything is made, the same stands at the end of what `check` and `doctor` print."""
    with pytest.raises(ConfigError) as caught:
        rftstream.run(config)
    assert said in str(caught.value)
    assert not (Path(config.base) / "runs").exists()
    report = check(config)
    assert [one for one in report.errors if said in one], report.errors
    assert said in report.to_text().splitlines()[-1]
    problems = [f"{one.found}; {one.todo}" for one in examine(config).findings if one.level is Level.problem]
    assert len([one for one in problems if said in one]) == 1, problems


def test_what_can_start(config: RunConfig) -> None:
    planned = plan(config, Purpose.begin)
    assert planned.looked
    assert [problem.found for problem in planned.problems] == []
    assert list(Path(config.base).iterdir()) == [], "nothing is left behind"


def test_a_gpu_that_is_not_there(config: RunConfig) -> None:
    refused_by_all(loader.replace(config, trainer__device=GPU), f"trainer.device: {GPU!r} is not there, torch sees ")
    with pytest.raises(ConfigError, match=r"explorer\.devices: .* is not there"):
        plan(loader.replace(config, explorer__devices=("cpu", GPU)), Purpose.begin)
    several = loader.replace(config, trainer__device=GPU, explorer__devices=("cuda:98", "cuda:97", GPU))
    said = "\n".join(problem.found for problem in plan(several, Purpose.report).problems)
    assert said.count(" is not there") == 2 and "explorer.devices: 'cuda:97,98' is not there" in said
    plan(loader.replace(config, evaluator__device=GPU), Purpose.begin)  # there are no evaluations
    plan(loader.replace(config, trainer__device=GPU), Purpose.make)  # others start the workers


OWN_TASKSET = """
class Broken:
    def __init__(self, config, *, location, columns, system):
        raise OSError("no licence for these problems")
"""


@each(
    ("changes", "said"),
    [
        ({"source": "jsonl:absent.jsonl"}, "absent.jsonl: no such file; expected a file of JSON lines"),
        ({"source": "parquet:parts/*.parquet"}, "parts/*.parquet: nothing matches"),
        ({"source": "hf:./absent"}, "no such folder"),
        ({"source": "jsonl:empty.jsonl"}, "empty.jsonl: is empty, expected one JSON object a line"),
        ({"columns": {"prompt": "qestion"}}, "no column 'qestion'; found question, solution_text; did you mean"),
        ({"source": "jsonl:late.jsonl", "options": {"skip": 500}}, "late.jsonl:1201: the prompt is a number"),
        ({}, "tasksets.sums.reward: exact: the problem has no answer; name its column"),
        ({"source": "own_problems:Broken"}, "tasksets.sums: OSError: no licence for these problems"),
    ],
)
def test_problems_that_cannot_be_read(config: RunConfig, changes: dict[str, Any], said: str) -> None:
    base = Path(config.base)
    rows = [json.dumps({"question": f"{n}+1=", "solution_text": str(n + 1)}) for n in range(1_200)]
    (base / "problems.jsonl").write_text("\n".join(rows))
    (base / "late.jsonl").write_text("\n".join([*rows, '{"question": 1}']))
    (base / "empty.jsonl").touch()
    (base / "own_problems.py").write_text(OWN_TASKSET)
    taskset = {"source": "jsonl:problems.jsonl", "columns": {"prompt": "question"}, "reward": "exact", **changes}
    refused_by_all(small_run(**{**loader.to_dict(config), "base": str(base), "tasksets": {"sums": taskset}}), said)


def test_only_what_is_quick_is_looked_at_before_a_run(tmp_path: Path) -> None:
    """The first rows of large files, and nothing on the hub or of another interpreter."""
    (tmp_path / "problems.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 1_000 + "no JSON")
    for source in ("jsonl:problems.jsonl", "hf:nobody/has-this", "gymnasium:Nowhere-v0"):
        config = small_run(
            base=str(tmp_path), run={"name": "tiny", "steps": 1}, explorer={"policy": "fake"},
            trainer={"backend": "fake"}, tasksets={"sums": {"source": source, "reward": "exact"}},
        )  # fmt: skip
        assert not plan(config, Purpose.report).problems


@each("device", ["cuda:x", "cuda:0,", GPU, f"cuda:0,{GPU[5:]}"])
def test_devices_that_are_refused(device: str) -> None:
    with pytest.raises(ConfigError, match=r"here: .*'cuda:"):
        check_device(device, where="here")


def test_devices_are_what_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda number: f"GPU {number}")
    assert [check_device(one) for one in ("cpu", "cuda", "cuda:1", "cuda:0,1")] == [
        "cpu",
        "GPU 0",
        "GPU 1",
        "GPU 0, GPU 1",
    ]
    with pytest.raises(ConfigError, match="'cuda:2' is not there, torch sees 2 GPUs, cuda:0 to cuda:1"):
        check_device("cuda:2")


def test_a_model_folder_without_weights(config: RunConfig, tmp_path: Path) -> None:
    folder = make(tmp_path).folder
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    config = loader.replace(config, model__path=str(folder), trainer__backend="torch")
    plan(config, Purpose.begin)
    weights.write_bytes(whole[:-100])
    refused_by_all(config, f"found {len(whole) - 100:,} bytes, expected {len(whole):,}: it was cut off")
    weights.unlink()
    refused_by_all(config, "has no weights, expected *.safetensors in it")
    plan(loader.replace(config, trainer__backend="fake"), Purpose.begin)  # it serves for tokens


def test_a_model_folder_with_a_part_of_its_weights(tmp_path: Path) -> None:
    folder = make(tmp_path).folder
    names = {"a": "model.safetensors", "b": "model-2.safetensors", "c": "model-3.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    section = loader.from_dict({
        "run": {"name": "r", "steps": 1}, "model": {"path": str(folder)}, "tasksets": {"s": {"source": "arithmetic"}},
    }).model  # fmt: skip
    with pytest.raises(ConfigError, match=r"2 of 3 files of weights are absent \(model-2\.safetensors\)"):
        check_complete(prepare_model(section, tmp_path, 0))


@pytest.mark.parametrize("setting", ["run__folder", "weights__store"])
def test_a_folder_in_which_nothing_can_be_made(config: RunConfig, tmp_path: Path, setting: str) -> None:
    """Not even root makes folders in /proc, though its rights say so; nor anybody in a file."""
    (tmp_path / "file").write_text("")
    for place in ("/proc/runs", f"{tmp_path}/file/runs"):
        refused_by_all(loader.replace(config, **{setting: place}), f"nothing can be made in {Path(place).parent} (")


def test_moments_in_eight_bits_without_their_package(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # as if it were not installed
    wanted = {"trainer__backend": "torch", "backends": {"torch": {"moments": "8bit"}}, "model": {"make": {}}}
    refused_by_all(
        loader.replace(config, **wanted), "backends.torch.moments: the package bitsandbytes is not installed"
    )


def test_s3_without_its_package(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as if it were not installed
    monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, "s3", raising=False)
    refused_by_all(
        loader.replace(config, weights__store="s3://bucket/{run}"), "`rftstream doctor --install s3` brings it"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("place", "error", "text", "code"), [
    ("without_keys", StoreRefused, "set AWS_ACCESS_KEY_ID", 2), ("nowhere", StoreUnreachable, "given up after", 3),
])  # fmt: skip
def test_s3_without_keys_and_one_that_does_not_answer(
    config: RunConfig, request: pytest.FixtureRequest, place: str, error: type[RftError], text: str, code: int
) -> None:
    """Before anything is made, and by the supervisor where nobody asked before."""
    request.getfixturevalue(place)
    config = loader.replace(config, weights__store="s3://bucket/{run}", weights__patience_s=0.5)
    with pytest.raises(error, match=text) as caught:
        rftstream.run(config)
    assert caught.value.exit_code == code
    assert text in check(config).errors[-1] and text in check(config).to_text().splitlines()[-1]
    result = run_unasked(config)
    assert result.exit_code == code
    assert "trainer-0: s3://bucket/tiny/" in str(result.error) and text in str(result.error)


def test_all_that_is_wrong_is_told_at_once(config: RunConfig) -> None:
    config = loader.replace(config, trainer__device=GPU, run__folder="/proc/runs", trainer__algorithm="gpro")
    with pytest.raises(ConfigError) as caught:
        rftstream.run(config)
    for said in ("unknown 'gpro'", "is not there, torch sees", "nothing can be made in /proc"):
        assert str(caught.value).count(said) == 1


@pytest.mark.slow
def test_settings_are_read_without_torch(tmp_path: Path) -> None:
    """A look at a run file that trains a model on a CPU imports neither torch nor transformers."""
    (tmp_path / "run.toml").write_text(
        '[run]\nname = "r"\nsteps = 1\n[model.make]\nwidth = 32\n[tasksets.s]\nsource = "arithmetic"\n'
    )
    program = (
        "import sys\nfrom pathlib import Path\nfrom rftstream.config import loader\n"
        "from rftstream.preflight.checks.check import check\n"
        f"report = check(loader.load([Path({str(tmp_path / 'run.toml')!r})]))\nassert report.ok, report.errors\n"
        "assert {part.name for part in report.parts} >= {'hf', 'torch', 'grpo'}\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stdout == "[]\n", done.stderr


# ------------------------------------------------------------------------------------------------ permanent or passing


def os_error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


@each(
    ("error", "code"),
    [
        (ConfigError("x"), 2), (StoreRefused("x"), 2), (StoreUnreachable("x"), 3), (errors.WeightsGone("x"), 1),
        (ImportError("no module"), 2), (os_error(errno.EACCES), 2), (os_error(errno.EROFS), 2),
        (os_error(errno.ENOSPC), 1), (os_error(errno.EMFILE), 1), (ConnectionResetError(), 1), (MemoryError(), 1),
        (RuntimeError("x"), 1),
    ],
)  # fmt: skip
def test_permanent_and_passing(error: Exception, code: int) -> None:
    assert exit_code_of(error) == code


def test_what_is_refused_for_good_is_never_tried_again() -> None:
    kinds: list[Any] = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, RftError)]
    again = [one for one in kinds if one.exit_code in (2, 4, 6, 7) and one.retriable]
    assert again == [errors.LogRefused], "a live run waits for rights and passwords, within transport.patience_s"


def test_a_store_in_a_folder_without_rights_refuses() -> None:
    with pytest.raises((StoreRefused, errors.WeightsError)) as caught:
        ObjectStore("file:///proc/self/status/store", base=Path("/")).put("a", b"1")
    assert isinstance(caught.value, StoreRefused), "a file is in the way"


# ------------------------------------------------------------------------------------------------ what workers find


def run_unasked(config: RunConfig) -> RunResult:
    """A run whose workers are the first to look; no process of it is started twice."""
    folder, said = RunFolder(Path(config.base) / "runs" / "tiny"), io.StringIO()
    options = SessionOptions(progress="plain", stream=said, deadline_s=35.0, spawner=None)
    with folder.held():
        result = RunSession(config, folder, options).run(new=True)
    assert "starting again" not in said.getvalue()
    assert (result.reason, result.steps) == ("failed", 0)
    return result


@pytest.mark.slow
def test_the_supervisor_ends_a_run_at_once_without_a_gpu(config: RunConfig) -> None:
    config = loader.replace(
        config, model__path=None, model__make=MakeModel(width=32), trainer__backend="torch", trainer__device=GPU
    )
    result = run_unasked(config)
    assert result.exit_code == 2
    assert f"trainer-0: device: {GPU!r} is not there, torch sees" in str(result.error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"explorer": {"policy": "fake"}}, "explorer.policy 'fake' does not record which experts tokens take"),
        ({"trainer": {"backend": "fake"}}, "trainer.backend 'fake' cannot force experts"),
        ({"backends": {"torch": {"compile": True}}}, "got 'replay' with backends.torch.compile"),
        ({"model": {"make": {"family": "qwen2"}}}, "Qwen2ForCausalLM is no mixture of experts"),
        ({"model": {"make": {"width": 32}}}, "is no mixture of experts"),
        ({"model": {"make": {"family": "phimoe"}}}, "PhimoeForCausalLM does not choose experts by a topk"),
        (
            {"sampling": {"max_tokens": 2_000_000}},
            "the experts of a token take 4 bytes, so a rollout of 2,000,000 tokens",
        ),
    ],
)
def test_a_routing_that_cannot_be_replayed_is_said(tmp_path: Path, changes: dict[str, Any], said: str | None) -> None:
    sections: dict[str, Any] = {
        "base": str(tmp_path), "run": {"name": "tiny", "steps": 2}, "explorer": {"policy": "hf"},
        "model": {"make": {"family": "qwen3_moe", "layers": 2, "width": 32, "heads": 2}},
        **changes, "trainer": {"routing": "replay", **changes.get("trainer", {})},
    }  # fmt: skip
    report = check(small_run(**sections))
    found = [one for one in (*report.errors, *report.warnings) if "trainer.routing: " in str(one)]
    assert [said in str(one) for one in found] == ([] if said is None else [True])
