"""The sampler and the scorer of docs/python.md, on desks without a log."""

import threading

import numpy as np

import rftstream
from rftstream.algorithms.base import TrainingRow
from rftstream.clock import SystemClock
from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.desk import Desk
from rftstream.joined.explorer import JoinedExplorer
from rftstream.joined.verifier import JoinedVerifier
from rftstream.models.rendering import open_renderer
from rftstream.policies.joined import JoinedPolicy, SamplerDesk
from rftstream.rewards.base import ScoreRequest, problem_input
from rftstream.rewards.joined import JoinedScorer
from tests.docs.reading import ROOT, blocks
from tests.unit import tiny


def follow(role, monkeypatch, me):
    """Run the page's block of this role."""
    monkeypatch.setattr(rftstream, "join", lambda run, role: me, raising=False)
    found = (block.text for block in blocks(ROOT / "docs" / "python.md", "python") if f'role="{role}"' in block.text)
    (text,) = found
    assert len(text.splitlines()) <= 40
    exec(compile(text, "docs/python.md", "exec"), {})


def test_the_sampler_of_the_page_gives_the_logprobs_of_the_backend(tmp_path, monkeypatch):
    spec = tiny.make(tmp_path)
    backend, desk = tiny.backend(spec), SamplerDesk()
    policy = JoinedPolicy(JoinedPolicy.Config(), model=spec, renderer=open_renderer(spec), clock=SystemClock(),
                          max_concurrent=4, desk=desk)  # fmt: skip
    policy.load(backend.served_tensors(), tiny.name(0))
    requests = {one.request_id: one for one in (tiny.request(number) for number in range(3))}
    done = {}

    def as_role():
        for request in requests.values():
            policy.submit(request)
        while policy.num_active:
            done.update((one.request_id, one) for one in policy.step())
        policy.close()

    role = threading.Thread(target=as_role, daemon=True)
    role.start()
    follow("explorer", monkeypatch, JoinedExplorer(desk))
    role.join()
    assert done.keys() == requests.keys()
    for key, completion in done.items():
        ids = np.array([*requests[key].token_ids, *completion.token_ids], np.int32)
        mask = (np.arange(len(ids)) >= len(requests[key].token_ids)).astype(np.float32)
        row = TrainingRow(token_ids=ids, loss_mask=mask, behavior_logprobs=mask, advantages=mask)
        np.testing.assert_allclose(backend.logprobs([row])[0][mask > 0], completion.behavior_logprobs, atol=1e-4)


def test_the_scorer_of_the_page(monkeypatch):
    desk = Desk()
    scorer = JoinedScorer(desk)
    item = problem_input(Problem(messages=(ChatMessage(role="user", content="1+2="),), answer=""))
    scorer.submit(ScoreRequest(request_id="1", taskset="sums", item=item))
    replies = []

    def as_role():
        while scorer.num_active:
            replies.extend(scorer.poll(0.02))
        scorer.close()

    role = threading.Thread(target=as_role, daemon=True)
    role.start()
    follow("verifier", monkeypatch, JoinedVerifier(desk))
    role.join()
    assert [(one.score.reward, one.score.parts) for one in replies] == [(1.0, {"exact": 1.0})]
