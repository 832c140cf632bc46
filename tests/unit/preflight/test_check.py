"""`check` finds what is wrong with a run file, all of it at once, and says what the run will need."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rftstream.config import loader
from rftstream.config.sections import MakeModel, ModelSection, RunConfig
from rftstream.models.folders.folder import prepare_model
from rftstream.preflight.checks.check import check
from rftstream.preflight.checks.check_report import CheckReport
from rftstream.preflight.memory import MAIN

Write = Callable[..., RunConfig]

RUN_FILE: dict[str, Any] = {
    "run": {"name": "demo", "steps": 10},
    "model": {"path": "fake", "context": 40},
    "explorer": {"policy": "fake"},
    "trainer": {"backend": "fake"},
    "tasksets": {"train": {"source": "jsonl:train.jsonl"}},
}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """A config with changes, beside a taskset of the given prompts."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(prompts: list[str] | None = None, /, **changes: Any) -> RunConfig:
        lines = [json.dumps({"prompt": prompt, "answer": "1"}) for prompt in prompts or ["1+1=", "1+2="]]
        (tmp_path / "train.jsonl").write_text("\n".join(lines))
        values: dict[str, Any] = json.loads(json.dumps(RUN_FILE)) | {"base": str(tmp_path)}
        for key, value in changes.items():
            *path, name = key.split("__")
            section = values
            for part in path:
                section = section.setdefault(part, {})
            section[name] = value
        return loader.from_dict(values)

    return make


def fine(config: RunConfig) -> CheckReport:
    report = check(config)
    assert report.errors == []
    return report


def errors(config: RunConfig) -> str:
    report = check(config)
    assert not report.ok
    assert "not ready" in report.to_text()
    return "\n".join(report.errors)


# --------------------------------------------------------------------------------------------- what is shown


def test_the_first_prompt_with_its_tokens(write: Write) -> None:
    report = fine(write(tasksets__train__system="Add."))
    (taskset,) = report.to_json()["tasksets"]
    assert taskset["problems"] == 2
    assert taskset["longest_prompt"] == len("Add.\n1+1=")
    assert taskset["first_prompt"]["messages"][0] == {"role": "system", "content": "Add."}
    assert taskset["first_prompt"]["token_ids"] == list(b"Add.\n1+1=")
    assert taskset["first_prompt"]["pieces"] == list("Add.\n1+1=")
    assert "[43]'+'" in report.to_text()
    assert report.to_text().endswith("ready to run")


def test_a_model_made_on_the_spot_leaves_nothing_behind(write: Write, tmp_path: Path) -> None:
    config = write(model={"make": {"characters": "0123456789+= ", "context": 16}, "dtype": "float32"})
    before = sorted(tmp_path.rglob("*"))
    report = fine(config)
    assert sorted(path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts) == before
    assert report.disk is not None
    assert report.disk.parameters > 10_000
    assert report.disk.snapshot_bytes == 4 * report.disk.parameters
    assert report.disk.checkpoint_bytes == 12 * report.disk.parameters


@pytest.mark.parametrize(("algorithms", "each"), [({}, 16), ({"grpo": {"kl_coef": 0.1}}, 20)])
def test_what_the_trainer_holds_in_memory(write: Write, algorithms: dict[str, Any], each: int) -> None:
    report = fine(write(algorithms=algorithms, trainer__backend="torch", explorer__policy="hf", model={"make": {}}))
    assert report.disk is not None
    assert report.memory is not None
    held = {role.role: role for role in report.memory.roles}["trainer"].parts[MAIN]
    of_the_model = sum(held.get(what, 0) for what in ("weights", "gradients", "moments", "reference"))
    head = 4 * 17 * 64  # the gradient of the head while it is added to that of the embeddings
    assert of_the_model == each * report.disk.parameters + head
    assert ("reference" in held) == bool(algorithms)
    assert "main memory: up to " in report.to_text()


def test_engines_without_a_model_have_rollouts_in_hand_too(write: Write) -> None:
    report = fine(write())
    assert report.memory is not None
    assert {role.role for role in report.memory.roles} >= {"feeder", "explorer", "verifier", "buffer", "trainer"}
    assert "main memory: up to " in report.to_text()


def of_trainer(report: CheckReport, role: str = "trainer") -> dict[str, int]:
    assert report.memory is not None
    (found,) = (one for one in report.memory.roles if one.role == role)
    return dict(found.parts[MAIN])


def test_what_ranks_hold_in_memory(write: Write) -> None:
    """Stage 1 spreads masters and moments, stage 2 gradients; weights and version 0 are whole in each while loaded."""
    settings: dict[str, Any] = {
        "trainer__backend": "deepspeed", "explorer__policy": "hf", "trainer__minibatches": 2,
        "algorithms": {"grpo": {"kl_coef": 0.1}}, "model": {"make": {}},
    }  # fmt: skip
    reports = {
        stage: fine(write(**settings, backends__deepspeed={"stage": stage, "processes": 4})) for stage in range(4)
    }
    num = reports[0].disk.parameters
    head = 4 * 17 * 64
    for stage, report in reports.items():
        held, parts = of_trainer(report), 1 if stage == 0 else 4
        assert held["weights"] == held["reference"] == 4 * num
        assert held["moments"] == 8 * num // parts
        assert held["state before the batch"] == 12 * num // parts
        assert held.get("masters", 0) == held.get("gradients of masters", 0) == (num if stage else 0)
        assert held["gradients"] == 4 * num // (4 if stage >= 2 else 1) + head
        (rank,) = (one for one in report.memory.roles if one.role == "rank")
        assert rank.count == 3
        of_trainer_alone = {"published version", "batches", "rows", "log"}
        assert dict(rank.parts[MAIN]) == {what: held[what] for what in held if what not in of_trainer_alone}


def test_ranks_have_a_gpu_each(write: Write) -> None:
    report = check(write(
        trainer__backend="deepspeed", trainer__device="cuda:1", explorer__policy="hf", model={"make": {}},
        backends__deepspeed={"stage": 2, "processes": 3, "offload_optimizer": True},
    ))  # fmt: skip
    assert report.memory is not None
    places = {place: role for role in report.memory.roles for place in role.parts if role.role in ("trainer", "rank")}
    assert [places[f"cuda:{number}"].role for number in (1, 2, 3)] == ["trainer", "rank", "rank"]
    for number in (1, 2, 3):
        held = places[f"cuda:{number}"].parts
        assert held[f"cuda:{number}"]["gradients in exchange"] == 4 * 500_000_000
        assert held[MAIN]["masters"] == held[MAIN]["moments"]  # as large again is the buffer for them
        assert "moments" not in held[f"cuda:{number}"]


def test_a_renewed_reference_of_ranks_is_spread(write: Write) -> None:
    settings: dict[str, Any] = {
        "trainer__backend": "deepspeed", "explorer__policy": "hf", "trainer__reference_every": 2,
        "algorithms": {"grpo": {"kl_coef": 0.1}}, "backends__deepspeed": {"stage": 1, "processes": 4},
    }  # fmt: skip
    whole = of_trainer(fine(write(**settings, model={"make": {}})))
    assert "renewed reference" not in whole  # version 0 was there before, and took more
    adapted = of_trainer(fine(write(**settings, model={"make": {}, "lora": {"rank": 2}})))
    assert "reference" not in adapted
    assert adapted["renewed reference"] == adapted["moments"]  # its part of it, and of the policy
    settings["backends__deepspeed"] = {
        "stage": 1, "processes": 4, "config": {"zero_optimization": {"reduce_bucket_size": 10, "overlap_comm": True}},
    }  # fmt: skip
    assert of_trainer(fine(write(**settings, model={"make": {}})))["gradients in exchange"] == 4 * 2 * 10


def test_a_critic_is_counted(write: Write) -> None:
    """Weights and gradients 8, moments 8; in a checkpoint masters and moments 12, as of the policy."""
    settings = {"trainer__backend": "torch", "explorer__policy": "hf", "model": {"make": {}}}
    without, with_one = fine(write(**settings)), fine(write(**settings, trainer__algorithm="ppo"))
    num = without.disk.parameters
    assert with_one.memory.total(MAIN) - without.memory.total(MAIN) == 16 * num
    assert with_one.disk.checkpoint_bytes == 2 * without.disk.checkpoint_bytes == 24 * num


def test_a_critic_of_ranks_is_spread(write: Write) -> None:
    """By stage 2: weights 4, its part of gradients 4, of masters, their gradients and moments 16; and a copy of the
    policy's masters and moments, for its step is taken before that of the critic."""
    settings: dict[str, Any] = {"trainer__backend": "deepspeed", "explorer__policy": "hf", "model": {"make": {}}}
    settings["backends__deepspeed"] = {"stage": 2, "processes": 4}
    without = fine(write(**settings))
    held, before = of_trainer(fine(write(**settings, trainer__algorithm="ppo"))), of_trainer(without)
    num = without.disk.parameters
    assert held["critic with gradients"] == 4 * num + num
    assert held["critic's optimizer"] == 4 * num
    assert held["state before the batch"] == 3 * num
    assert "state before the batch" not in before


def test_long_rows_are_spread_over_the_ranks_of_a_group(write: Write) -> None:
    settings: dict[str, Any] = {"trainer__backend": "deepspeed", "explorer__policy": "hf", "model": {"make": {}}}
    alone, split = (
        of_trainer(fine(write(**settings, backends__deepspeed={"processes": 4, "sequence_parallel": number})))
        for number in (1, 2)
    )
    assert split["activations"] == alone["activations"] // 2


def test_a_backend_without_a_critic_is_refused(write: Write) -> None:
    report = check(write(trainer__algorithm="ppo"))
    assert report.errors == [
        "trainer.backend: 'fake' cannot hold a critic, which 'ppo' has; use 'torch' or 'deepspeed', or an algorithm "
        "without one"
    ]


def test_memory_by_hand(write: Write) -> None:
    """Made models have no grouped heads: 2 layers, width 64, MLP 128, 17 tokens."""
    config = write(
        trainer__backend="torch", explorer__policy="hf", model={"make": {}, "dtype": "bfloat16"},
        explorer__count=2, feeder={"groups_per_batch": 1, "group_size": 2}, sampling={"max_tokens": 10},
    )  # fmt: skip
    report = fine(config)
    assert report.memory is not None
    (longest,) = (line.longest + 10 for line in report.tasksets if line.kind == "taskset")
    roles = {role.role: role for role in report.memory.roles}
    trainer, explorer = roles["trainer"].parts[MAIN], roles["explorer"].parts[MAIN]
    floats = 4 * 64 + 3 * 64 + 2 * 64 + 2 * 64 + 4 * 128
    assert trainer["activations"] == 2 * longest * 2 * 4 * floats
    assert trainer["logits"] == 4 * 2 * longest * 17
    assert explorer["cache"] == 64 * longest * 2 * 2 * 64 * 2
    assert "turns" not in explorer
    assert explorer["weights"] == explorer["version in hand"] == 2 * report.disk.parameters
    assert roles["explorer"].total(MAIN) == 2 * sum(explorer.values())
    assert report.memory.machine[MAIN] > 0


def test_adapters_take_less_memory_and_disk(write: Write) -> None:
    settings = {"trainer__backend": "torch", "explorer__policy": "hf", "algorithms": {"grpo": {"kl_coef": 0.1}}}
    whole = fine(write(**settings, model={"make": {}}))
    adapted = fine(write(**settings, model={"make": {}, "lora": {"rank": 2}}))
    assert adapted.disk.snapshot_bytes == 2 * 2 * 2 * (4 * (64 + 64) + 3 * (64 + 128))
    held = {role.role: role for role in adapted.memory.roles}["trainer"].parts[MAIN]
    assert held["gradients"] == 2 * adapted.disk.snapshot_bytes
    assert "reference" not in held
    assert adapted.memory.total(MAIN) < whole.memory.total(MAIN)


def test_too_little_memory_is_said(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rftstream.preflight.memory._there", lambda place: 1_000)
    report = fine(write(trainer__backend="torch", explorer__policy="hf", model={"make": {}}))
    assert any(warning.startswith("main memory: the run may need") for warning in report.warnings)


def test_evaluations_are_looked_at_too(write: Write) -> None:
    config = write(evaluations__held_out={"source": "arithmetic", "num_tasks": 3, "reward": "math"})
    (_, evaluation) = fine(config).to_json()["tasksets"]
    assert (evaluation["kind"], evaluation["problems"], evaluation["reward"]) == ("evaluation", 3, "math")


@pytest.mark.parametrize(
    "reward",
    ["environment", {"name": "environment", "weight": 0.5}, [{"name": "exact"}, {"name": "environment"}],
     [{"name": "exact"}, {"name": "environment", "use": "gate"}]],
)  # fmt: skip
def test_a_reward_that_the_environment_never_gives_is_refused(write: Write, reward: Any) -> None:
    config = write(tasksets__train__reward=reward)
    assert "'single_turn' never gives a reward: no rollout could be scored" in errors(config)


def test_a_second_opinion_may_have_none(write: Write) -> None:
    fine(write(tasksets__train__reward=[{"name": "exact"}, {"name": "environment", "use": "check"}]))


def test_own_parts(write: Write, tmp_path: Path) -> None:
    (tmp_path / "own_check_parts.py").write_text("def score(completion, answer):\n    return 1.0\n")
    fine(write(tasksets__train__reward="own_check_parts:score"))


# --------------------------------------------------------------------------------------------- what is refused


def test_every_error_is_told_at_once(write: Write) -> None:
    config = write(
        explorer__policy="fakee", trainer__algorithm="gpro", tasksets__train__reward="exat",
        evaluations__e={"source": "jsonl:nowhere.jsonl"}, backends__fake__skil=1,
    )  # fmt: skip
    text = errors(config)
    for expected in ("unknown 'fakee'", "did you mean 'grpo'", "did you mean 'exact'", "nowhere.jsonl: no such file",
                     "backends.fake.skil: unknown key"):  # fmt: skip
        assert expected in text
    assert text.count("'gpro'") == 1, "each once"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kind": "kafka"}, "transport.servers: missing, expected where the brokers"),
        ({"kind": "kafka", "servers": ""}, "--set transport.servers=HOST:9092"),
        ({"kind": "kafka", "servers": "x:1", "options": {"sasl_mechanizm": "PLAIN"}}, "did you mean 'sasl_mechanism'?"),
        ({"kind": "kafka", "servers": "x:1", "options": {"replication_factor": "x"}}, "replication_factor: got 'x'"),
        ({"kind": "kafka", "servers": "x:1", "options": {"replication_factor": 0}}, "replication_factor: got 0"),
        ({"kind": "kafka", "servers": "x:1", "options": {"sasl_plain_password": "env:NOT_THERE"}}, "NOT_THERE is not"),
        ({"kind": "memory"}, "transport.kind: 'memory' lives in one process"),
    ],
)
def test_a_log_that_no_run_could_open(write: Write, settings: dict[str, Any], said: str) -> None:
    text = errors(write(transport=settings))
    assert said in text
    assert len(text.splitlines()) == 1


@pytest.mark.slow
def test_a_broker_that_is_away_is_no_fault_of_the_run_file(write: Write) -> None:
    report = fine(write(transport={"kind": "kafka", "servers": "127.0.0.1:1,brokr.invalid"}))
    assert "(no address for brokr.invalid, brokr.invalid has no port: 9092 was tried)" in report.to_json()["no_answer"]
    assert report.to_text().endswith("the log does not answer: not ready to run")


def write_rows(folder: Path, *rows: dict[str, Any]) -> None:
    (folder / "train.jsonl").write_text("\n".join(json.dumps({"prompt": "1+1=", **row}) for row in rows))


@pytest.mark.parametrize(
    ("reward", "rows", "said"),
    [
        ("exact", [{"solution": "2"}, {"solution": "3"}],
         "exact: the problem has no answer; name its column in the taskset's columns. So it is with all 2 looked at; "
         "beside the prompt it has solution"),
        ("math", [{}], "math: the problem has no answer; name its column in the taskset's columns. So it is with all 1 "
         "looked at; beside the prompt it has nothing"),
        ("exact", [{"reward_model": {"style": "rule", "ground_truth": "2"}}],
         "it has reward_model.style, reward_model.ground_truth"),
        ([{"name": "own_check_columns:ours"}, {"name": "exact", "weight": 0.5}], [{"answer": "2"}],
         "own_check_columns:ours: needs solution, but the problem has only answer,"),
        ("own_check_columns:verl", [{"other": 1}], "own_check_columns:verl: needs ground_truth, but"),
        ("own_check_columns:trl", [{"answer": "2"}], "own_check_columns:trl: needs solution, but"),
    ],
)  # fmt: skip
def test_a_reward_that_could_score_no_problem(
    write: Write, tmp_path: Path, reward: Any, rows: list[dict[str, Any]], said: str
) -> None:
    (tmp_path / "own_check_columns.py").write_text(
        "def ours(completion, solution):\n    return float(completion == '2')\n"
        "def verl(data_source, solution_str, ground_truth, extra_info=None):\n    return float(solution_str == '2')\n"
        "def trl(completions, solution, **kwargs):\n    return [float(one == '2') for one in completions]\n"
    )
    config = write(tasksets__train__reward=reward)
    write_rows(tmp_path, *rows)
    text = errors(config)
    assert text.startswith("tasksets.train.reward: ")
    assert said in text
    assert len(text.splitlines()) == 1
    named = {"solution": "2", "answer": "2"}
    write_rows(tmp_path, named, named)
    assert "reward" not in "\n".join(fine(config).warnings)


def test_a_reward_of_trl_over_messages_that_would_get_texts(write: Write, tmp_path: Path) -> None:
    (tmp_path / "own_check_form.py").write_text(
        "def trl(completions, **kwargs):\n    return [1.0 for _ in completions]\n"
        "def ours(completion):\n    return 1.0\n"
    )
    chat = [{"role": "user", "content": "1+1="}]
    config = write(tasksets__train__reward="own_check_form:trl")
    assert "signature of TRL" not in "\n".join(fine(config).warnings)
    write_rows(tmp_path, {"prompt": chat})
    assert 'set columns = { messages = "prompt" }' in "\n".join(fine(config).warnings)
    named = write(tasksets__train__reward="own_check_form:trl", tasksets__train__columns={"messages": "prompt"})
    ours = write(tasksets__train__reward="own_check_form:ours")
    write_rows(tmp_path, {"prompt": chat})
    for config in (named, ours):
        assert "signature of TRL" not in "\n".join(fine(config).warnings)


@pytest.mark.slow
def test_a_reward_of_an_evaluation_of_another_kind(write: Write) -> None:
    text = errors(write(evaluations__e={"source": "arithmetic", "reward": "reasoning_gym"}))
    assert "evaluations.e.reward: reasoning_gym: the problem has no 'dataset'; its taskset must be" in text


def test_a_line_that_is_not_json_is_named(write: Write, tmp_path: Path) -> None:
    config = write()
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": \n')
    assert "train.jsonl:2: not JSON" in errors(config)


def test_a_file_without_its_kind_is_told(write: Write) -> None:
    assert "did you mean 'jsonl:train.jsonl'?" in errors(write(tasksets__train__source="train.jsonl"))


def test_an_own_module_that_fails_is_named(write: Write, tmp_path: Path) -> None:
    (tmp_path / "own_check_broken.py").write_text("1 / 0\n")
    config = write(tasksets__train__environment="own_check_broken:Env")
    text = errors(config)
    assert "own_check_broken" in text
    assert "ZeroDivisionError" in text


def test_a_missing_model_does_not_hide_the_rest(write: Write) -> None:
    text = errors(write(model__path="./nowhere", tasksets__train__reward="exat"))
    assert "nowhere: no such folder" in text
    assert "did you mean 'exact'" in text


def test_what_is_misspelt_is_said_the_right_way_round(write: Write, tmp_path: Path) -> None:
    report = check(write(trainer__algorithm="gpro", algorithms__grpo={}, tasksets__train__source="jsonl:trian.jsonl"))
    assert "algorithms.grpo: nothing uses it; the run uses 'gpro'; is that misspelt?" in report.warnings
    assert "did you mean train.jsonl?" in (text := report.to_short_text()) and "0 problems" not in text
    config = write(tasksets__train__columns={"prompt": "question"})
    (tmp_path / "train.jsonl").write_text('{"problem": "1+1=", "solution": "2"}')
    assert "found problem, solution; did you mean 'problem'?; set" in errors(config)


def test_prompts_longer_than_the_context(write: Write) -> None:
    prompts = ["1+1=", "9" * 40, "8" * 39]
    assert "train: problem 1 (train.jsonl:2) has a prompt of 40 tokens" in errors(write(prompts))
    assert not [one for one in check(write(prompts)).warnings if "longer than" in one], "the error says it, and more"
    for policy, means in (("skip", "left out"), ("truncate", "cut from the left")):
        report = fine(write(prompts, tasksets__train__too_long=policy))
        assert report.tasksets[0].too_long == 1
        assert f"tasksets.train: 1 prompt of 3 longer than the context of 40, {means}" in report.warnings
    assert "nothing is left" in errors(write(["9" * 40], tasksets__train__too_long="skip"))


def test_a_late_long_prompt_is_found_without_rendering_all(write: Write) -> None:
    assert "problem 1100 (train.jsonl:1101) has a prompt of 50 tokens" in errors(write([*["1+1="] * 1_100, "9" * 50]))


# --------------------------------------------------------------------------------------------- warnings


@pytest.mark.slow
def test_a_long_template_hides_no_late_long_prompt(write: Write) -> None:
    """Whose text alone would fit, with what templates usually add to it."""
    made = {"make": {"characters": "0123456789+=", "layers": 1, "width": 16, "heads": 2}, "context": 100,
            "chat_template": "{{ '0' * 60 }}{% for m in messages %}{{ m.content }}{% endfor %}"}  # fmt: skip
    prompts = [*["1+1="] * 1100, "1+" * 20 + "1="]
    found = write(prompts, model=made, sampling__max_tokens=3)
    assert "problem 1100 (train.jsonl:1101) has a prompt of 102 tokens" in errors(found)
    (line,) = fine(write(prompts, model=made, sampling__max_tokens=3, tasksets__train__too_long="skip")).tasksets
    assert (line.too_long, line.longest, line.num_rendered) == (1, 64, 1001), "what is left out takes no memory"
    (line,) = fine(write(prompts[:1100], model=made, sampling__max_tokens=3)).tasksets
    assert line.num_rendered == 1000


@pytest.mark.parametrize(
    ("update", "said"),
    [
        ("vllm", "1 explorer and 1 evaluator would give the server weights"),
        ("sglang", "got 'sglang'; known: vllm, vllm-cpu"),
    ],
)
def test_servers_that_are_given_weights(write: Write, update: str, said: str) -> None:
    openai = {"url": "http://127.0.0.1:9/v1", "model": "m", "update": update, "update_folder": "weights"}
    held_out = {"source": "jsonl:train.jsonl"}
    text = errors(write(explorer__policy="openai", policies__openai=openai, evaluations__held_out=held_out))
    assert f"policies.openai.update: {said}" in text


def test_how_many_prompts_were_rendered_is_said_if_not_all(write: Write) -> None:
    assert "  longest of 1,000 rendered prompts 1 token\n" in fine(write(["1"] * 1001, model__context=80)).to_text()
    assert "  longest prompt 4 tokens\n" in fine(write()).to_text()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"explorer__count": 9, "transport__partitions": 4}, "explorer.count: 9 workers share 4 partitions"),
        ({"verifier__count": 0}, "verifier.count: 0, so the run waits until `rftstream worker --role verifier`"),
        ({"feeder__group_size": 1}, "feeder.group_size: 1 is below buffer.min_siblings = 2"),
        ({"feeder__group_size": 1}, "grpo compares siblings"),
        ({"trainer__algorithm": "dapo"}, "dynamic sampling is a part of dapo"),
        ({"trainer__algorithm": "dr_grpo"}, "dr_grpo.row_tokens: 256, but sampling.max_tokens is 8"),
        (
            {"sampling__top_p": 0.7, "trainer__masks": "own"},
            "left (0.7 to 1), and correction = 'tis' weighs tokens by it",
        ),
        (
            {
                "tasksets__train__sampling": {"top_k": 5},
                "algorithms__grpo__correction": "icepop",
                "trainer__masks": "own",
            },
            "'icepop' drops tokens",
        ),
        ({"sampling__presence_penalty": 0.5}, "sampled with presence_penalty = 0.5"),
        ({"trainer__minibatches": 9}, "trainer.minibatches: 9, but a batch has only 8 groups"),
        ({"tasksets__train__reward": [{"name": "exact", "weight": 0.0}]}, "every weight is 0"),
        ({"tasksets__train__reward": [{"name": "exact"}, {"name": "math", "weight": 0.0}]}, "math with weight 0"),
        ({"tasksets__more": {"source": "arithmetic", "weight": 0.0}}, "tasksets.more.weight: 0"),
        ({"rewards__exat": {}}, "rewards.exat: nothing uses it; known: exact; did you mean 'exact'?"),
        ({"sampling__max_tokens": 37}, "leaves 36 tokens of the context for a completion, less than max_tokens = 37"),
        ({"tasksets__train__passes": 1}, "the tasksets end after 2 groups, which make 0 batches"),
        ({"transport": {"kind": "embedded", "servers": "x:1"}}, "transport.servers: nothing uses it, since"),
        ({"transport": {"kind": "embedded", "options": {"acks": 1}}}, "transport.options: nothing uses it, since"),
        ({"trainer__algorithm": "dapo"}, "overlong_share = 0.2 takes from the reward of completions of more than 6.4"),
    ],
)
def test_warnings(write: Write, changes: dict[str, Any], text: str) -> None:
    assert text in "\n".join(fine(write(**{"sampling__max_tokens": 8, **changes})).warnings)


def test_a_run_of_demonstrations_alone_has_no_tasksets_that_could_end(write: Write, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "手2"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}))
    experts = {"source": f"{tmp_path}/chats.jsonl", "per_batch": 1}
    report = fine(write(tasksets={}, experts=experts, trainer__algorithm="sft", run__steps=1))
    assert "tasksets" not in " ".join(report.warnings) and "['手2" in report.to_short_text(), "of three tokens"


def test_a_prompt_that_holds_its_solution(write: Write, tmp_path: Path) -> None:
    config = write(sampling__max_tokens=8)
    chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    write_rows(tmp_path, {"prompt": chat, "answer": "2"})
    assert "tasksets.train: the first prompt ends with a turn of the assistant" in "\n".join(fine(config).warnings)


def test_problems_that_the_reward_could_not_score(write: Write, tmp_path: Path) -> None:
    config = write(sampling__max_tokens=8, tasksets__train__options={"skip": 1})
    write_rows(tmp_path, {"answer": "2"}, {"answer": "3"}, {"answer": None, "hint": "4"})
    (warning,) = fine(config).warnings
    assert "1 of 2 looked at, whose rollouts will have no reward; the first is problem 1 (train.jsonl:3)" in warning
    assert warning.endswith("beside the prompt it has hint")


def test_a_function_that_is_given_no_answer(write: Write, tmp_path: Path) -> None:
    (tmp_path / "own_check_answer.py").write_text("def score(completion, answer):\n    return answer is None\n")
    config = write(sampling__max_tokens=8, tasksets__train__reward="own_check_answer:score")
    write_rows(tmp_path, {"solution": "2"})
    warning, of_empty = fine(config).warnings
    assert "1 for completions that say nothing" in of_empty
    assert "own_check_answer:score takes `answer`, which is None in all 1 problems looked at" in warning
    assert warning.endswith("beside the prompt the first has solution")
    exact = write(tasksets__train__reward="exact")
    for lacking in (None, "", "NaN"):
        write_rows(tmp_path, {"answer": "2"}, {"answer": lacking}, {"answer": None})
        said = f"the first is problem 1 (train.jsonl:2); own_check_answer:score gets {lacking!r} for them"
        assert any(said in one for one in fine(config).warnings)
        write_rows(tmp_path, {"answer": "2"}, {"answer": lacking or " "})
        assert "no answer, the first is problem 1 (train.jsonl:2); the reward" in " ".join(fine(exact).warnings)


def with_unknown(folder: Path, characters: str, context: int) -> dict[str, Any]:
    """A model whose tokenizer has a token for what it does not know."""
    import tokenizers

    folder = folder / "with-unknown"
    prepare_model(ModelSection(make=MakeModel(characters=characters, width=16, context=context)), folder, 0)
    words = {"<eos>": 0, "<unk>": 1, **{character: place for place, character in enumerate(characters, start=2)}}
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.model = tokenizers.models.WordLevel(words, unk_token="<unk>")
    tokenizer.save(str(folder / "tokenizer.json"))
    return {"path": str(folder)}


def test_characters_that_the_tokenizer_does_not_know(write: Write, tmp_path: Path) -> None:
    model = with_unknown(tmp_path, "0123456789+=", 32)
    warnings = "\n".join(fine(write(["1+1=", "what is 1+1=", "1-1="], model=model)).warnings)
    assert (
        "tasksets.train: 2 prompts with characters that the tokenizer does not know, the first in problem 1" in warnings
    )
    assert "use another tokenizer" in warnings
    assert "does not know" not in "\n".join(fine(write(["1+1="], model=model)).warnings)


def test_a_character_that_comes_late_is_found_too(write: Write, tmp_path: Path) -> None:
    """Beyond those that are all rendered."""
    model = with_unknown(tmp_path, "0123456789+=", 80)
    prompts = ["1+1="] * 1100 + ["1+2=", "1-1=", "1-1=", "1*1="]
    report = fine(write(prompts, model=model))
    (line,) = report.tasksets
    assert line.unknown == [1101, 1103]
    assert line.num_rendered == 1003, "and the one with the first 2"
    (warning,) = [warning for warning in report.warnings if "does not know" in warning]
    assert warning.startswith("tasksets.train: at least 2 prompts with characters")
    assert "the first in problem 1101" in warning


@pytest.mark.parametrize("place", [0, 1, 1101])
def test_a_made_model_refuses_what_it_has_no_token_for(write: Write, place: int) -> None:
    """It is made for these tasks: an error, with the problem and the characters, wherever they come."""
    prompts = [*["1+1="] * place, "1w+1?"]
    report = check(write(prompts, model={"make": {"characters": "0123456789+=", "context": 32}}))
    (error,) = report.errors
    assert error.startswith(f"tasksets.train: problem {place} (train.jsonl:{place + 1}): model made-")
    assert "has no token for 'w', '?'; add what is missing to model.make.characters" in error


@pytest.mark.parametrize(
    ("name", "skip", "size", "trained", "warns"),
    [("held-out", 0, 2, 0, False), ("held-out", 1, 2, 1, True), ("sums", 2, 3, 3, False),
     ("held-shown", 0, 2, 1, True)],
)  # fmt: skip
def test_what_is_called_held_out_is_not_trained_on(write, tmp_path, name, skip, size, trained, warns):
    prompts = [f"{number}+1=" for number in range(5)]
    evaluations = {name: {"source": "jsonl:train.jsonl", "options": {"skip": skip, "size": size}}}
    (tmp_path / "chats.jsonl").write_text('{"prompt": "0+1=", "completion": "1"}')
    shown = {"experts": {"source": "chats.jsonl"}, "trainer__algorithm": "mix"} if name == "held-shown" else {}
    report = fine(write(prompts, tasksets__train__options={"skip": 2}, evaluations=evaluations, **shown))
    assert [line.trained for line in report.tasksets] == [0, trained]
    assert ("so it is not held out" in " ".join(report.warnings)) == warns
    assert ("are trained on, too" in report.to_text()) == (trained > 0)


def test_nothing_to_warn_about(write: Write) -> None:
    assert fine(write(sampling__max_tokens=8)).warnings == []
