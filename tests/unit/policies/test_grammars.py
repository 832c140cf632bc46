import dataclasses
import json
import re
from contextlib import nullcontext

import numpy as np
import pytest

from rftstream.contracts.token_values import ALLOWED
from rftstream.errors import ConfigError
from rftstream.policies.base import Constraint
from rftstream.policies.grammars import check_forms
from tests.flow.scene import make_config
from tests.suite.each import each
from tests.unit import tiny
from tests.unit.policies.test_hf import row

pytest.importorskip("llguidance")

MODEL = {"seed": 3, "characters": '0123456789{}[]":,abn-'}

FORMS = {
    "regex": ("[0-9]{2}-[ab]+", re.compile(r"\d{2}-[ab]+").fullmatch),
    "choice": (["12", "12-3", "b"], ["12", "12-3", "b"].__contains__),
    "json": ({"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 2}, None),
    "grammar": ('root ::= "a" ("b" | [0-3])+ "n"', re.compile(r"a[b0-3]+n").fullmatch),
}
"""Kind -> value, and whether a text has the form."""


def requests(kind, count=12, **sampling):
    constraint = Constraint(kind=kind, value=FORMS[kind][0], setting="sampling.grammar")
    return [
        dataclasses.replace(tiny.request(n, (2, 3), max_tokens=24, **sampling), constraint=constraint)
        for n in range(count)
    ]


def has_form(kind, text):
    value, fits = FORMS[kind]
    if fits is not None:
        return fits(text)
    found = json.loads(text)
    return len(found) >= value["minItems"] and all(isinstance(one, int) and one <= 99 for one in found)


@pytest.fixture
def policy(spec, backend):
    return tiny.policy(spec, backend.served_tensors(), records=[ALLOWED], batch_size=16)


@pytest.fixture(scope="module")
def backend(spec):
    return tiny.backend(spec)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.8, "temperature": 1.4}, {"temperature": 0.0, "min_tokens": 7}])
def test_each_answer_has_its_form_and_the_trainers_logprobs(policy, backend, kind, sampling):
    free = [tiny.request(100 + n, (2, 3), max_tokens=24) for n in range(3)]
    asked = requests(kind, **sampling)
    for one in [*asked[:6], *free, *asked[6:]]:
        policy.submit(one)
    done = tiny.drain(policy)
    rows, stopped = [], 0
    for request in asked:
        completion = done[request.request_id]
        assert completion.finish_reason in ("stop", "length"), completion.error
        if completion.finish_reason == "stop":
            text = policy._renderer.decode(completion.token_ids)
            assert has_form(kind, text), text
            stopped += 1
        rows.append(row(request, completion, sampling.get("temperature", 1.0) or 1.0))
    assert stopped or sampling.get("temperature") == 0  # the likeliest may go on and on
    for one, found in zip(rows, backend.logprobs(rows), strict=True):
        np.testing.assert_allclose(found, one.behavior_logprobs, atol=1e-5)
    assert not any(done[one.request_id].beside for one in free)


@pytest.mark.parametrize("kind", FORMS)
def test_a_rollout_goes_on_elsewhere_in_the_state_of_its_form(spec, backend, policy, kind):
    [whole] = requests(kind, 1)
    policy.submit(whole)
    policy.step()
    begun = policy.so_far(whole.request_id)
    done = tiny.drain(policy)[whole.request_id]
    ids, num = begun.token_ids.tolist(), len(begun.token_ids)
    elsewhere = tiny.policy(spec, backend.served_tensors(), records=[ALLOWED])
    rest = tiny.drain_one(
        elsewhere,
        dataclasses.replace(whole, token_ids=(*whole.token_ids, *ids), num_sampled=num, max_tokens=24 - num),
    )
    assert [*ids, *rest.token_ids] == done.token_ids.tolist()
    counts_T = done.beside[ALLOWED].counts_T
    assert rest.beside[ALLOWED].counts_T.tolist() == counts_T[num:].tolist()
    assert rest.beside[ALLOWED].values.tolist() == done.beside[ALLOWED].cut(num).values.tolist()


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        ("regex", "(", "sampling.grammar: regex: "),
        ("json", {"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
        ("json", "{", "sampling.grammar: json: "),
        ("grammar", "root ::= foo", "Rule 'foo' not found"),
    ],
)
def test_what_is_no_form_is_said(policy, kind, value, says):
    constraint = Constraint(kind=kind, value=value, setting="sampling.grammar")
    completion = tiny.drain_one(policy, dataclasses.replace(tiny.request(0, (2, 3)), constraint=constraint))
    assert completion.finish_reason == "error"
    assert says in completion.error


@each(
    ("changes", "says"),
    [
        ({"sampling__grammar": {"regex": "a+"}}, None),
        ({"sampling__grammar": {"regex": "("}}, r"^sampling\.grammar: regex: .*unclosed group"),
        ({"tasksets__sums__sampling": {"grammar": {"json": "{"}}}, r"^tasksets\.sums\.sampling\.grammar: json: "),
        ({"sampling__grammar": {"regex": "a"}, "explorer__policy": "fake"}, r"policy 'fake' does not constrain tokens"),
    ],
)
def test_forms_of_a_run_are_checked(changes, says):
    config = make_config(**{"explorer__policy": "hf", **changes})
    with nullcontext() if says is None else pytest.raises(ConfigError, match=f"(?s){says}"):
        check_forms(config)


def test_tokens_that_break_the_form_are_said(policy):
    [request] = requests("regex", 1)
    broken = dataclasses.replace(request, token_ids=(2, 3, 11), num_sampled=1)
    assert "the tokens sampled so far break it" in tiny.drain_one(policy, broken).error
