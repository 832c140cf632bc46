"""The reward `judge`: rollouts a second where one answer in twenty is slow, beside as many requests without a pause."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rftstream.config.loader import from_dict
from rftstream.rewards.base import RewardInput, ScoreRequest
from rftstream.rewards.scorer import ProcessScorer

USUAL_S, SLOW_S, SLOW_SHARE = 0.25, 5.0, 0.05
MAX_CONCURRENT = 32
NUM_ROLLOUTS = 1_000
NUM_WAITING = 256
"""Rollouts that the scorer holds at a time, as a verifier does."""


def run() -> list[dict[str, Any]]:
    rows = []
    with _judge() as url:
        served = {"name": "judge", "url": url, "model": "judge", "max_concurrent": MAX_CONCURRENT, "cache_mib": 0}
        rewards: dict[str, list[dict[str, Any]]] = {"alone": [served], "beside exact": [{"name": "exact"}, served]}
        for name, reward in rewards.items():
            mean_s = (1 - SLOW_SHARE) * USUAL_S + SLOW_SHARE * SLOW_S
            ours, limit = _rate(reward), MAX_CONCURRENT / mean_s
            rows.append(
                {
                    "name": f"judge {name}: {SLOW_SHARE:.0%} of answers in {SLOW_S:g} s, the others in {USUAL_S:g} s",
                    "unit": "rollouts/s",
                    "ours": ours,
                    "reference": limit,
                    "reference_name": f"{MAX_CONCURRENT} requests at once",
                    "ratio": ours / limit,
                }
            )
    return rows


def _rate(reward: list[dict[str, Any]]) -> float:
    tasksets = {"train": {"source": "arithmetic", "reward": reward}}
    config = from_dict({"model": {"path": "tiny"}, "tasksets": tasksets, "run": {"name": "judge", "steps": 1}})
    with closing(ProcessScorer(config)) as scorer:
        while scorer.grouped is None:
            scorer.poll(0.1)
        began, submitted, scored = time.perf_counter(), 0, 0
        while scored < NUM_ROLLOUTS:
            while scorer.num_active < NUM_WAITING and submitted < NUM_ROLLOUTS + NUM_WAITING:
                submitted += 1
                scorer.submit(ScoreRequest(request_id=str(submitted), taskset="train", item=_item(str(submitted))))
            scored += sum(reply.score is not None for reply in scorer.poll(0.1))
        return scored / (time.perf_counter() - began)


def _item(completion: str) -> RewardInput:
    return RewardInput(completion=completion, answer="7", prompt="3+4=", messages=(), info={}, data_source="",
                       num_tokens=1, truncated=False)  # fmt: skip


@contextmanager
def _judge() -> Iterator[str]:
    """Serve answers, some of them late; yield the URL."""
    body = json.dumps({"choices": [{"finish_reason": "stop", "message": {"content": "Score: 10"}}]}).encode()
    draws, lock = random.Random(0), threading.Lock()

    class Answer(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            with lock:
                is_slow = draws.random() < SLOW_SHARE
            time.sleep(SLOW_S if is_slow else USUAL_S)
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    class Server(ThreadingHTTPServer):
        request_queue_size, daemon_threads, block_on_close = 256, True, False

        def handle_error(self, *_: object) -> None:
            """Say nothing of connections that end with the scorer."""

    server = Server(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
