"""What tests run in depends on the machine in what it must: where programs lie, and how packages are fetched."""

from __future__ import annotations

import os
from pathlib import Path

from rftstream.threads import thread_limits
from tests.surroundings import SYSTEM_PATH, TOOLS, enter, surroundings

THEIRS = {
    "HOME": "/home/ada", "PATH": "/opt/slurm/bin:/usr/bin", "LANG": "tr_TR.UTF-8", "LC_ALL": "tr_TR.UTF-8",
    "TERM": "xterm-kitty", "COLUMNS": "40", "TZ": "Asia/Kolkata", "NO_COLOR": "1", "PYTHONWARNINGS": "error",
    "RFTSTREAM_CONFIG": "mine.toml", "RFTSTREAM__TRAINER__LR": "1", "HF_HOME": "/data/hf", "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "3", "OMP_NUM_THREADS": "64", "SLURM_JOB_ID": "7", "KAFKA_OPTS": "-Dx", "RANK": "1",
    "AWS_PROFILE": "work", "MLFLOW_TRACKING_URI": "http://mlflow", "WANDB_MODE": "online", "XDG_CACHE_HOME": "/x",
}  # fmt: skip


def test_nothing_of_the_user_is_left(tmp_path: Path) -> None:
    own = surroundings({**THEIRS, "https_proxy": "http://proxy:3128"}, tmp_path)
    assert own == {
        "HOME": str(tmp_path / "home"), "PATH": os.pathsep.join([str(tmp_path / "bin"), *SYSTEM_PATH]),
        "LANG": "C.UTF-8", "TERM": "dumb", "COLUMNS": "80", "LINES": "24", "TZ": "UTC", "https_proxy": "http://proxy:3128",
        "no_proxy": "127.0.0.1,localhost,::1", "NO_PROXY": "127.0.0.1,localhost,::1", **thread_limits(1),
        "UV_CACHE_DIR": "/x/uv",
    }  # fmt: skip
    assert list((tmp_path / "home").iterdir()) == []


def test_tools_from_elsewhere_are_found_and_no_others(tmp_path: Path) -> None:
    elsewhere = tmp_path / "opt"
    elsewhere.mkdir()
    for name in ("promtool", "sbatch"):
        (elsewhere / name).write_text("#!/bin/sh\n")
        (elsewhere / name).chmod(0o755)
    surroundings({"PATH": str(elsewhere)}, tmp_path / "own")
    linked = {path.name: path.resolve() for path in (tmp_path / "own" / "bin").iterdir()}
    assert linked.keys() <= set(TOOLS)
    assert linked.get("promtool", elsewhere / "promtool") == elsewhere / "promtool"


def test_entering_twice_is_entering_once(tmp_path: Path) -> None:
    variables = {**THEIRS, "PYTEST_XDIST_WORKER": "gw1"}
    enter(variables)
    once = dict(variables)
    enter(variables)
    assert variables == once
    assert once["PYTEST_XDIST_WORKER"] == "gw1"
