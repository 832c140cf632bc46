"""What `hf` decodes over: the cache against plain lists, attention with grouped heads, and what is kept of prompts and
turns."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from random import Random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import rftstream.policies.hf.cache
from rftstream.metrics import REGISTRY
from rftstream.policies.hf.attention import attend
from rftstream.policies.hf.cache import SMALL, SPARE_COLUMNS, SlotCache
from rftstream.policies.hf.prompts import Block, PromptStore
from rftstream.policies.hf.turns import KeptTurn, TurnStore
from rftstream.policies.prefix_tree import PrefixTree
from tests.suite.each import each
from tests.unit import tiny
from tests.unit.policies.test_hf import row

LAYERS, HEADS, WIDTH = 2, 3, 4


def states_of(lengths, longest, random):
    """Of a block of prompts, padded on the left."""
    shape = (len(lengths), HEADS, longest, WIDTH)
    return [(torch.from_numpy(random.standard_normal(shape)), torch.from_numpy(random.standard_normal(shape)))
            for _ in range(LAYERS)]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "small"), [(0, SMALL), (1, SMALL), (2, SMALL), (0, 0)])
def test_rows_come_grow_and_go(monkeypatch, seed, small):
    monkeypatch.setattr(rftstream.policies.hf.cache, "SMALL", small)
    random = np.random.default_rng(seed)
    cache = SlotCache(max_slots=9)
    rows: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # per slot and layer its keys and values [H, L, D]

    def join():
        lengths = random.integers(1, 2 * SPARE_COLUMNS, size=3).tolist()
        states = states_of(lengths, max(lengths), random)
        which = random.integers(0, 3, size=int(random.integers(1, 10 - len(rows)))).tolist()
        slots = cache.put(states, which, [lengths[one] for one in which])
        assert not rows.keys() & set(slots)
        for slot, one in zip(slots, which, strict=True):
            rows[slot] = [tuple(part[one, :, -lengths[one] :] for part in layer) for layer in states]

    def grow(most=1):
        chosen = random.permutation(list(rows))[: int(random.integers(1, len(rows) + 1))].tolist()
        counts = random.integers(1, most + 1, size=len(chosen)).tolist()
        before = [rows[slot][0][0].shape[1] for slot in chosen]
        columns = [np.arange(start, start + count) for start, count in zip(before, counts, strict=True)]
        cache.write(np.repeat(chosen, counts), np.concatenate(columns))
        for layer in range(LAYERS):
            new = states_of([1], sum(counts), random)[0]
            seen = cache.for_model.update(*new, layer)
            for slot, end, count in zip(chosen, np.cumsum(counts).tolist(), counts, strict=True):
                rows[slot][layer] = tuple(
                    torch.cat([old, part[0, :, end - count : end]], 1)
                    for old, part in zip(rows[slot][layer], new, strict=True)
                )
            for slot, layers in rows.items():
                for part, expected in zip(seen, layers[layer], strict=True):
                    assert torch.equal(part[slot, :, : expected.shape[1]], expected)
            assert all(torch.isfinite(part).all() for part in seen)

    def leave():
        gone = [slot for slot in rows if random.random() < 0.4]
        for slot in gone:
            del rows[slot]
        cache.free(gone)
        assert cache.num_free == 9 - len(rows)

    def copy():
        slot = random.choice(list(rows))
        length = int(random.integers(1, rows[slot][0][0].shape[1] + 1))
        for found, layer in zip(cache.row(slot, length), rows[slot], strict=True):
            for part, expected in zip(found, layer, strict=True):
                assert torch.equal(part[0], expected[:, :length])

    for _ in range(60):
        if not rows:
            join()
        random.choice([grow, grow, grow, lambda: grow(most=7), copy, leave] + [join] * (len(rows) < 9))()
        for _ in range(SPARE_COLUMNS if rows and random.random() < 0.1 else 0):
            grow()
    cache.free(list(rows))
    assert cache.num_free == 9 and cache.for_model is None, "its memory is given back"


@pytest.mark.parametrize(("context", "columns"), [(None, 5 + SPARE_COLUMNS), (9, 9), (3, 5)])
def test_there_is_room_for_no_more_than_the_context(context, columns):
    cache = SlotCache(max_slots=2, max_columns=context)
    cache.put(states_of([5], 5, np.random.default_rng(0)), [0], [5])
    assert cache.for_model.layers[0].rooms[0].shape[2] == columns


def test_what_a_broken_row_left_behind_reaches_nobody():
    random = np.random.default_rng(0)
    cache = SlotCache(max_slots=4)
    broken = [tuple(torch.full_like(part, torch.nan) for part in layer) for layer in states_of([9], 9, random)]
    cache.put(states_of([5, 3], 5, random), [0, 1], [5, 3])
    [slot] = cache.put(broken, [0], [9])
    cache.free([slot], clean=False)
    assert cache.put(states_of([2], 2, random), [0], [2]) == [slot]
    cache.write(np.asarray([0, slot]), np.asarray([5, 2]))
    new = torch.zeros((1, HEADS, 2, WIDTH), dtype=torch.float64)
    assert all(
        torch.isfinite(part).all() for layer in range(LAYERS) for part in cache.for_model.update(new, new, layer)
    )


def test_the_newest_prompts_are_known():
    def block(*prompts):
        states = states_of([len(one) for one in prompts], max(map(len, prompts)), np.random.default_rng(0))
        return Block(prompts=prompts, states=states, logits_UV=torch.zeros(len(prompts), 7),
                     shifts_U=np.zeros(len(prompts), np.int64))  # fmt: skip

    store = PromptStore(max_tokens=10, max_prompts=4)
    first, second, third = block((1, 2, 3), (4,)), block((5, 6)), block((4,), (7, 8))
    store.add(first)
    store.add(second)
    assert store.place((4,)) == (first, 1)
    assert store.place((5, 6)) == (second, 0)
    assert store.place((5,)) is None
    store.add(third)  # 6 + 2 + 4 tokens with padding: the oldest has to go
    assert store.place((1, 2, 3)) is None
    assert store.place((5, 6)) == (second, 0)
    store.add(huge := block(tuple(range(50))))
    assert store.place(tuple(range(50))) == (huge, 0)
    assert store.place((5, 6)) is None
    store.add(block((1,), (2,), (3,), (4,)))  # five prompts: the oldest has to go
    assert store.place(tuple(range(50))) is None
    assert store.place((2,)) is not None
    store.clear()
    assert store.place((2,)) is None


@each(("queries", "heads"), [(1, 2), (5, 2), (1, 6), (5, 6)])
def test_attention_is_that_of_transformers(queries, heads):
    random = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(3, number, length, 8, generator=random)
                         for number, length in ((6, queries), (heads, 11), (heads, 11)))  # fmt: skip
    module = torch.nn.Module()
    module.num_key_value_groups = 6 // heads
    mask = torch.rand(3, 1, queries, 11, generator=random) < 0.6
    mask[..., 0] = True
    ours, _ = attend(module, query, key, value, mask, scaling=0.3)
    theirs, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    ours, _ = attend(module, query, key[:, :, :queries], value[:, :, :queries], None)
    theirs, _ = sdpa_attention_forward(module, query, key[:, :, :queries], value[:, :, :queries], None)
    assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_logprobs_of_a_model_with_grouped_heads_are_those_that_the_trainer_computes(tmp_path):
    spec = tiny.make(tmp_path, seed=5)
    config = json.loads((spec.folder / "config.json").read_text())
    size = config["hidden_size"] // config["num_attention_heads"]
    (spec.folder / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 2}))
    tensors = load_file(spec.folder / "model.safetensors")
    save_file({name: tensor[: 2 * size].clone() if "k_proj" in name or "v_proj" in name else tensor
               for name, tensor in tensors.items()}, spec.folder / "model.safetensors", {"format": "pt"})  # fmt: skip
    backend = tiny.backend(spec)
    policy = tiny.policy(spec, backend.served_tensors(), batch_size=5)
    requests = [tiny.request(n, range(3, 4 + n % 3 * 4), max_tokens=2 + n % 7) for n in range(20)]
    for one in requests:
        policy.submit(one)
    done = tiny.drain(policy)
    for request in requests:
        again = backend.logprobs([row(request, done[request.request_id])])[0][len(request.token_ids) :]
        np.testing.assert_allclose(done[request.request_id].behavior_logprobs, again, atol=2e-5)


@pytest.fixture
def policy(tmp_path):
    """One that says how many prompts it computed at a time: `policy.computed`."""
    spec = tiny.make(tmp_path, seed=3)
    policy = tiny.policy(spec, tiny.backend(spec).served_tensors(), batch_size=16)
    policy.computed = []
    compute = policy._model.compute
    policy._model.compute = lambda prompts, *more: (policy.computed.append(len(prompts)), compute(prompts, *more))[1]
    return policy


def test_siblings_share_their_prompt(policy):
    for number in range(12):
        policy.submit(tiny.request(number, (4, 11, 5) if number < 8 else (3, 4)))
    policy.step()
    assert policy.computed == [2]
    policy.submit(tiny.request(20, (3, 4)))  # one that comes later
    policy.step()
    assert policy.computed == [2]
    assert "r20" in {one.request_id for one in policy._batch._requests} | tiny.drain(policy).keys()


@pytest.mark.slow
def test_prompts_of_older_weights_are_computed_again(policy, tmp_path):
    policy.submit(tiny.request(0, (4, 11, 5), max_tokens=1))
    tiny.drain(policy)
    other = tiny.backend(tiny.make(tmp_path / "other", seed=99))
    policy.load(other.served_tensors(), tiny.name(1))
    request = tiny.request(1, (4, 11, 5))
    policy.submit(request)
    completion = tiny.drain(policy)["r1"]
    assert policy.computed == [1, 1]
    again = other.logprobs([row(request, completion)])[0][3:]
    np.testing.assert_allclose(completion.behavior_logprobs, again, atol=2e-5)


@pytest.mark.slow
def test_a_new_prompt_waits_no_longer_than_it_is_worth(policy):
    for number in range(6):
        policy.submit(tiny.request(number, (4, 11, 5), max_tokens=40, min_tokens=40))
    policy.step()
    policy.submit(tiny.request(6, (3, 4), max_tokens=40, min_tokens=40))
    waited = 0
    while len(policy.computed) == 1:
        policy.step()
        waited += 1
    assert waited == 6  # the steps after which the empty place has cost as much as computing the prompt will
    tiny.drain(policy)
    assert policy.computed == [1, 1]


@pytest.mark.slow
def test_prompts_are_computed_within_the_budget(tmp_path):
    spec = tiny.make(tmp_path, seed=3)
    policy = tiny.policy(spec, tiny.backend(spec).served_tensors(), batch_size=64, prefill_tokens=20)
    shapes = []
    compute = policy._model.compute
    policy._model.compute = lambda prompts, *more: (
        shapes.append((len(prompts), max(map(len, prompts)))), compute(prompts, *more)
    )[1]  # fmt: skip
    for number in range(12):
        policy.submit(dataclasses.replace(tiny.request(number, [3 + number] * (1 + number)), max_tokens=30))
    policy.submit(tiny.request(12, [5] * 30))
    tiny.drain(policy)
    assert sum(rows for rows, _ in shapes) == 13
    assert all(rows * columns <= 20 or (rows, columns) == (1, 30) for rows, columns in shapes)


# --------------------------------------------------------------------------------------------- turns


def turns_of(policy, *, num_rollouts=9, num_turns=4, waits=0):
    """Rollouts whose prompts go on from what was sampled, with one to nine new tokens in each turn, which are there
    after so many steps."""
    random = np.random.default_rng(1)
    replies = random.integers(1, 17, size=(num_rollouts, num_turns, 9)).tolist()
    lengths = random.integers(1, 10, size=(num_rollouts, num_turns)).tolist()
    found, turn_of = {}, Counter()

    def ask(name, known):
        turn, number = turn_of[name], int(name[1:])
        policy.submit(dataclasses.replace(
            tiny.request(number, (*known, *replies[number][turn][: lengths[number][turn]]), max_tokens=6),
            may_go_on=True,
        ))  # fmt: skip
        asked[name] = (*known, *replies[number][turn][: lengths[number][turn]])

    asked = {}
    for number in range(num_rollouts):
        ask(f"r{number}", ())
    step, answers = 0, []
    while policy.num_active or answers:
        for one in policy.step():
            found[one.request_id, turn_of[one.request_id]] = one
            turn_of[one.request_id] += 1
            if turn_of[one.request_id] < num_turns:
                answers.append((step + waits, one.request_id, (*asked[one.request_id], *one.token_ids.tolist())))
        while answers and answers[0][0] <= step:
            ask(*answers.pop(0)[1:])
        step += 1
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "waits"),
    [
        pytest.param({}, 0, id="all in their slots"),
        pytest.param({}, 3, id="slow environments"),
        pytest.param({"batch_size": 3}, 3, id="some copied, since others need their slots"),
        pytest.param({"prefill_tokens": 10}, 0, id="few new tokens at a time"),
    ],
)
def test_a_turn_goes_on_from_what_was_computed(tmp_path, config, waits):
    spec = tiny.make(tmp_path, seed=3)
    tensors = tiny.backend(spec).served_tensors()
    anew = turns_of(tiny.policy(spec, tensors, turn_tokens=0))
    policy = tiny.policy(spec, tensors, **config)
    gone_on, copied = [], []
    go_on, copy = policy._batch.go_on, policy._cache.row
    policy._batch.go_on = lambda request, turn, *more: (gone_on.append(turn.slot), go_on(request, turn, *more))[1]
    policy._cache.row = lambda slot, length: (copied.append(slot), copy(slot, length))[1]
    again = turns_of(policy, waits=waits)
    assert len(gone_on) == 9 * 3, "all turns but the first"
    assert None not in gone_on and bool(copied) == ("batch_size" in config)
    assert anew.keys() == again.keys() and len(anew) == 36
    for key, one in anew.items():
        assert one.token_ids.tolist() == again[key].token_ids.tolist()
        np.testing.assert_allclose(one.behavior_logprobs, again[key].behavior_logprobs, atol=2e-5)


def forks_of(policy):
    """An agent of eight turns with two forks, each of two turns: one begins with a history beside the next turn, one
    with a part of a turn that is long gone on from. Returns its completions, and the tokens that were asked for."""
    random = np.random.default_rng(2)
    found, asked = {}, 0

    def ask(**prompts):
        nonlocal asked
        for name, prompt in prompts.items():
            policy.submit(dataclasses.replace(tiny.request(len(found), prompt, max_tokens=6), request_id=name,
                                              may_go_on=True))  # fmt: skip
            asked += len(prompt)
        found.update(done := tiny.drain(policy))
        return [(*prompt, *done[name].token_ids.tolist()) for name, prompt in prompts.items()]

    def said(known):
        return (*known, *random.integers(1, 17, size=5).tolist())

    known, fork, histories = tuple(random.integers(1, 17, size=40).tolist()), None, []
    for turn in range(8):
        histories.append(known)
        if turn == 3:
            known, fork = ask(main3=said(known), fork3=said(known))
        elif turn == 6:
            known, fork = ask(main6=said(known), fork6=said(histories[4][:-2]))
        else:
            [known] = ask(**{f"main{turn}": said(known)})
        if turn in (4, 7):
            ask(**{f"fork{turn}": said(fork)})
    return found, asked


def prompt_tokens(result):
    return REGISTRY.get_sample_value("rftstream_prompt_tokens_total", {"result": result}) or 0.0


@pytest.mark.slow
@pytest.mark.parametrize("config", [{}, {"batch_size": 2}, {"turn_tokens": 150}], ids=str)
def test_forks_go_on_from_the_deepest_beginning(tmp_path, config):
    spec = tiny.make(tmp_path, seed=3, context=256)
    tensors = tiny.backend(spec).served_tensors()
    anew, asked = forks_of(tiny.policy(spec, tensors, turn_tokens=0))
    computed, reused = prompt_tokens("computed"), prompt_tokens("reused")
    again, _ = forks_of(tiny.policy(spec, tensors, **config))
    computed, reused = prompt_tokens("computed") - computed, prompt_tokens("reused") - reused
    assert computed + reused == asked and len(anew) == 12
    # The first prompt, and of each other one the five new tokens, and of a whole turn its last token, too.
    assert computed <= 45 + 11 * 6 if "turn_tokens" not in config else computed < asked / 3
    for name, one in anew.items():
        assert one.token_ids.tolist() == again[name].token_ids.tolist()
        np.testing.assert_allclose(one.behavior_logprobs, again[name].behavior_logprobs, atol=2e-5)


@pytest.mark.slow
def test_a_rollout_whose_next_turn_comes_at_once_misses_no_pass(policy):
    forward, shapes = policy._model.forward, []
    policy._model.forward = lambda inputs, *more: (shapes.append(inputs["position_ids"].shape), forward(inputs, *more))[
        1
    ]
    found = turns_of(policy)
    num_tokens = Counter()
    for (name, _), one in found.items():
        num_tokens[name] += len(one.token_ids)
    assert shapes[0][0] == 9, "the first prompts"
    assert len(shapes) == max(num_tokens.values()), "each pass gives a token, the first one too"


def test_turns_end_with_their_weights(tmp_path):
    spec = tiny.make(tmp_path, seed=3)
    tensors = tiny.backend(spec).served_tensors()
    policy = tiny.policy(spec, tensors)
    first = dataclasses.replace(tiny.request(0), may_go_on=True)
    said = tiny.drain_one(policy, first).token_ids.tolist()
    longer = (*first.token_ids, *said, 3)
    assert policy._turns.find(longer) is not None
    policy.load(tensors, tiny.name(1))
    assert policy._turns.find(longer) is None
    policy.submit(dataclasses.replace(tiny.request(1), may_go_on=True, max_tokens=40))
    policy.step()
    policy.load(tensors, tiny.name(2))
    other = tiny.drain(policy)["r1"]
    assert policy._turns.find((*tiny.request(1).token_ids, *other.token_ids.tolist(), 3)) is None, "of two versions"


def test_the_store_of_turns():
    cache = SlotCache(max_slots=4)

    def turn(*token_ids):
        [slot] = cache.put(states_of([1], len(token_ids), np.random.default_rng(token_ids[0])), [0], [len(token_ids)])
        return KeptTurn(token_ids, slot)

    def found(*prompt, **more):
        beginning = store.find(prompt, **more)
        return beginning and (beginning.turn.token_ids, beginning.length, beginning.is_moved)

    def keys(slot, length):
        return cache.row(slot, length)[0][0]

    store = TurnStore(10, cache, lambda prompt, length: 7 not in prompt)
    for one in (first := turn(1, 2), turn(1, 2, 3), last := turn(4, 5)):
        store.add(one)
    assert found(1, 2, 3) == ((1, 2), 2, True) and found(1, 2, 3, 9) == ((1, 2, 3), 3, True)
    assert found(2, 1, 3, 9) is None and found(1, 2, 7) is None
    assert found(1, 2)[1:] == found(1, 9)[1:] == (1, False), "one token is to be computed"
    assert found(4, 9, 9) is None, "less than half of it"
    assert found(1, 9, num_alike=3) is None, "the prompt once is less"
    store.make_room(2)
    assert first.slot is None and first.states[0][0].shape[2] == 2, "the oldest was copied"
    assert found(1, 2, 9) == ((1, 2), 2, True)
    before = keys(last.slot, 2)
    taken = store.take(store.find((4, 5, 6)))
    assert taken.token_ids == (4, 5) and found(4, 5, 6) == ((4, 5), 2, False), "a fork may begin with what is lent"
    fork = store.take(store.find((4, 5, 6)))
    assert fork.slot != taken.slot and torch.equal(keys(fork.slot, 2), before)
    of_copy = store.take(store.find((1, 9)))
    assert of_copy.token_ids == (1,) and cache.num_free == 0
    cache.free([taken.slot])
    assert found(4, 5, 6) is None, "its row is gone"
    store.clear()
    assert found(1, 2, 3, 9) is None and store.is_empty
    assert cache.num_free == 2, "all slots but those of the rows"


def test_a_tree_of_beginnings_says_what_a_list_of_all_says():
    def num_shared(one, other):
        return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
                    min(len(one), len(other)))  # fmt: skip

    for seed in range(100):
        random, tree, kept = Random(seed), PrefixTree(), {}
        for _ in range(40):
            tokens, prompt = (tuple(random.choices((0, 1), k=random.randint(1, 9))) for _ in range(2))
            if random.random() < 0.6:
                kept[tokens] = object()
                tree.add(tokens, kept[tokens])
            elif kept:
                tree.remove(tokens, object())
                tree.remove(tokens := random.choice(sorted(kept)), kept.pop(tokens))
            lengths = range(len(prompt), 0, -1)
            assert tree.whole(prompt) == [(end, kept[prompt[:end]]) for end in lengths if prompt[:end] in kept]
            deepest, values = tree.deepest(prompt)
            assert deepest == max((num_shared(one, prompt) for one in kept), default=0)
            assert not deepest or set(values) == {
                value for one, value in kept.items() if num_shared(one, prompt) == deepest
            }
