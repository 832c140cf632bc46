"""vLLM's own server, with a made model, as what the policy `openai` samples from and gives weights to."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import urllib.request

import numpy as np
import psutil
import pytest

from rftstream.clock import SystemClock
from rftstream.models.rendering import open_renderer
from rftstream.policies.openai.policy import OpenAiPolicy
from tests.engines.replay import Replay
from tests.engines.test_in_flight import PROMPTS, versions_of
from tests.engines.test_vllm import TOLERANCE
from tests.loopback import free_ports
from tests.unit import tiny

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),
]

START_S = 600.0


MODEL = {"seed": 3, "width": 128, "context": 256}


@pytest.fixture(scope="module")
def server(spec, tmp_path_factory):
    with serving(spec, tmp_path_factory.mktemp("server") / "log") as url:
        yield url


@contextlib.contextmanager
def serving(spec, log, *options):
    """Url of the API, while it lives."""
    [port] = free_ports(1)
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(spec.folder),
        "--served-model-name", "made", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
        "--enforce-eager", "--worker-extension-cls", "rftstream.policies.vllm.worker.WeightsReceiver",
        "--logprobs-mode", "processed_logprobs", "--kv-cache-memory-bytes", str(1 << 26), "--max-num-seqs", "32",
        *options,
    ]  # fmt: skip
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        deadline = time.monotonic() + START_S
        while not answers(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        process.wait(60)
        for one in psutil.wait_procs(family, 30)[1]:
            one.kill()


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def test_a_server_samples_by_the_weights_that_it_was_given(server, spec, tmp_path):
    """New versions come while requests follow one another: all are answered, each by the version that it is stamped
    with and by no other."""
    config = OpenAiPolicy.Config(
        url=server, model="made", batch_size=16, update="vllm-cpu", update_folder=str(tmp_path), timeout_s=120.0
    )
    policy = OpenAiPolicy(config, model=spec, renderer=open_renderer(spec), clock=SystemClock())
    replay, names, requests, by_version = Replay(spec), [], {}, {}
    for name, tensors in versions_of(tiny.backend(spec), 4):
        names.append(name)
        replay.add(name, tensors)
        policy.load(tensors, name)
        while len(by_version.get(name.version, ())) < 12:
            while policy.num_active < 24:
                number = len(requests)
                requests[f"r{number}"] = tiny.request(number, PROMPTS[number % 4], max_tokens=40, min_tokens=20)
                policy.submit(requests[f"r{number}"])
            file(policy.step(), by_version)
    file(tiny.drain(policy).values(), by_version)
    policy.close()
    assert sum(map(len, by_version.values())) == len(requests)
    assert by_version.keys() == {name.version for name in names}
    for version, completions in by_version.items():
        for completion in completions[:8]:
            for name in names:
                expected = replay.logprobs(requests[completion.request_id], completion, only=name)
                difference = np.abs(expected - completion.behavior_logprobs).max()
                if name.version == version:
                    assert difference < TOLERANCE
                else:
                    assert difference > 100 * TOLERANCE


def file(completions, by_version):
    for completion in completions:
        assert completion.error is None
        (span,) = completion.versions
        assert span.count == len(completion.token_ids) >= 20
        by_version.setdefault(span.version, []).append(completion)
