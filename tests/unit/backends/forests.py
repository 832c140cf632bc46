"""Random forests of rows, and their loss, gradients and outputs in float64: as trees, or each row by itself."""

import dataclasses

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from rftstream.algorithms import ALGORITHMS
from rftstream.algorithms.base import TrainingRow
from rftstream.algorithms.by_taskset import BY
from rftstream.algorithms.opd import TEACHER
from rftstream.algorithms.policy_gradient import AGE_WEIGHT, DISCOUNT, PROXIMAL_SHARE
from rftstream.algorithms.ppo import RETURNS, VALUES
from rftstream.algorithms.ratios import KEPT
from rftstream.backends.passes import ALL_ROWS_LEARN, Passes
from rftstream.backends.torch import lora
from rftstream.backends.torch.critic import CriticPasses, ValueNetwork, load_critic
from rftstream.backends.torch.network import Network, NetworkSettings, load_model
from rftstream.backends.torch.scorer import ScoreNetwork, load_scorer
from rftstream.config.parts import registry
from rftstream.config.sections import LoraSection
from rftstream.contracts.beside import Beside
from rftstream.contracts.token_values import ALLOWED, EXPERTS
from rftstream.core.allowed import encode_sets
from rftstream.models.routers import Routing
from rftstream.models.vision.image_tokens import ImageTokens
from rftstream.models.vision.seeing import SeeingModel
from rftstream.weights.checkpoint_names import names_of
from tests.unit import tiny
from tests.unit.policies.test_images import PICTURES, prompted

CPU = torch.device("cpu")
DEPTH, CHILDREN, RUN = 6, 3, 5
MOST_ROWS = 7
FAMILIES = ("llama", "gemma3_text", "gpt2", "qwen3_moe", "vision")
"""One of each kind: rotary positions, windows, learned positions, experts that are replayed, images."""
KINDS = (*((family, "policy") for family in FAMILIES), ("llama", "adapters"), ("llama", "critic"), ("llama", "scorer"))
POLICIES = tuple(name for name, spec in ALGORITHMS.items() if not spec.trains_classifier)


class Doubled(TorchFunctionMode):
    """Computes in float64 where float32 is asked for, as norms and softmaxes of transformers do."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args = tuple(torch.float64 if one is torch.float32 else one for one in args)
        kwargs = {name: torch.float64 if one is torch.float32 else one for name, one in (kwargs or {}).items()}
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*args, **kwargs)


class Models:
    """Models by kind, in float64 and with weights that attention and experts depend on."""

    def __init__(self, folder):
        self.made = {kind: self._make(folder, *kind) for kind in KINDS}
        """Spec, class of the network, model, and further arguments of the network."""

    def _make(self, folder, family, role):
        place = folder / f"{family}-{role}"
        place.mkdir()
        settings = {"vision": True, "context": 128} if family == "vision" else {"family": family, "context": 128}
        spec = tiny.make(place, **settings)
        torch.manual_seed(1)
        if role == "critic":
            model, kind, more = load_critic(spec.folder, CPU, vocabulary=tiny.VOCABULARY), ValueNetwork, {}
        elif role == "scorer":
            model, kind, more = load_scorer(spec, CPU)[0], ScoreNetwork, {}
        else:
            model, kind, more = load_model(spec, CPU), Network, {}
            if family == "vision":
                more = {"seeing": SeeingModel.of(model, spec.folder), "shown": tiny.images(spec).inputs}
            if family == "qwen3_moe":
                model.set_experts_implementation("eager")  # products of experts in one call have no float64
                more = {"routing": Routing.of(model, where="here")}
        model.double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        if role == "adapters":
            wanted = dataclasses.replace(spec, lora=LoraSection(rank=2))
            parameters = lora.add_adapters(model, wanted, names_of(model, spec.folder))
            for parameter in parameters.values():
                parameter.data = torch.randn_like(parameter, dtype=torch.float64) * 0.2
        return spec, kind, model, more

    def network(self, kind, *, shared):
        _, network, model, more = self.made[kind]
        settings = NetworkSettings(autocast=None, max_logits_bytes=1 << 14, packing=shared, share_prefixes=shared)
        return network(model, settings, **more)


def random_rows(random, spec, kind):
    """Rows of a few random trees: forks, rows that end where others go on, equal ones, holes in the masks, and values
    beside tokens of which some differ although the tokens are equal."""
    family, _ = kind
    rows = []
    for group in range(int(random.integers(1, 3))):
        images = ()
        beginning = random.integers(0, tiny.VOCABULARY, int(random.integers(0, 9)))
        if family == "vision" and random.random() < 0.8:
            request = prompted(spec, 0, images=[PICTURES[int(random.integers(2))]], text="1+2")
            beginning, images = np.asarray(request.token_ids), request.images
        texts = grown(random, beginning, DEPTH)
        random.shuffle(texts)
        rows += [row_of(random, text, group, images) for text in texts[:MOST_ROWS] if len(text) > 1]
    spoken = np.arange(tiny.VOCABULARY)
    if family == "vision":  # placeholders have no probability
        never = ImageTokens.of(spec.folder).never_sampled
        spoken = np.setdiff1d(spoken, never)
        rows = [dataclasses.replace(row, loss_mask=row.loss_mask * ~np.isin(row.token_ids, never)) for row in rows]
        rows = [row for row in rows if row.token_ids[-1] not in never]  # which `paired` has something to learn
    order = random.permutation(len(rows)) if random.random() < 0.3 else range(len(rows))
    rows = [rows[number] for number in order] or [row_of(random, spoken[:3], 0, ())]
    if family == "qwen3_moe" and random.random() < 0.7:
        rows = [with_experts(random, row) for row in rows]
    return [with_sets(random, row) for row in rows] if random.random() < 0.3 else rows


def grown(random, text, depth):
    """Texts that begin with this one."""
    text = np.concatenate([text, random.integers(0, tiny.VOCABULARY, int(random.integers(1, RUN)))])
    children = int(random.integers(0, CHILDREN + 1)) if depth > 1 else 0
    texts = [text] * (1 if not children else int(random.random() < 0.3) + int(random.random() < 0.1))
    for _ in range(children):
        texts += grown(random, text, depth - 1)
    return texts


def row_of(random, token_ids, group, images):
    length = len(token_ids)
    floats = {name: random.random(length).astype(np.float32) for name in
              (KEPT, PROXIMAL_SHARE, AGE_WEIGHT, DISCOUNT, VALUES, RETURNS, TEACHER)}  # fmt: skip
    whole = {"expert": random.random() < 0.3, "mu": 0.3, "pair": group, "sign": random.choice([-1, 1]), BY: 0}
    mask = (random.random(length) < random.choice([0.4, 0.8])).astype(np.float32)
    return TrainingRow(
        token_ids=token_ids.astype(np.int32), loss_mask=mask, group=group, images=images,
        behavior_logprobs=np.where(mask, -2.9 + 0.3 * random.standard_normal(length), np.nan).astype(np.float32),
        advantages=np.full(length, random.choice([0.0, 1.0, -0.75, 0.25]), np.float32),  # sums of these are exact
        temperature=float(random.choice([1.0, 0.7])), rollout=int(random.integers(2)),
        additions={**floats, **{name: np.full(length, value, np.float32) for name, value in whole.items()}},
    )  # fmt: skip


def with_experts(random, row):
    """Experts that depend on the beginning, but for some rows that went other ways somewhere."""
    own = np.random.default_rng(int(row.token_ids[0]))
    counts = np.full(len(row.token_ids), 4, np.int32)
    counts[0] = 0
    values = own.integers(0, 2, (256, 2, 1)) + np.array([0, 2])
    values = values.reshape(256, 4)[: len(counts) - 1].copy()
    if random.random() < 0.3:
        values[int(random.integers(len(values)))] = [1, 0, 3, 2]
    return dataclasses.replace(row, beside={EXPERTS: Beside(counts, values.astype(np.uint8).reshape(-1))})


def with_sets(random, row):
    allowed = torch.from_numpy(random.random((len(row.token_ids), tiny.VOCABULARY)) < 0.6)
    allowed[torch.arange(len(allowed)), torch.from_numpy(row.token_ids).long() % tiny.VOCABULARY] = True
    written = encode_sets(allowed)
    column = Beside(np.asarray([len(one) for one in written], np.int32), np.frombuffer(b"".join(written), np.uint8))
    return dataclasses.replace(row, beside={**row.beside, ALLOWED: column})


def paired(rows):
    """The same rows as pairs, both sides of which have something to learn from."""
    found = []
    for group in dict.fromkeys(row.group for row in rows):
        own = [row for row in rows if row.group == group]
        for number, row in enumerate(own if own[1:] else own * 2):
            mask = row.loss_mask.copy()
            mask[-1] = 1
            sign = np.full(len(mask), 1 - 2 * (number % 2), np.float32)
            found.append(dataclasses.replace(row, loss_mask=mask, additions={**row.additions, "sign": sign}))
    return found


def algorithm_of(random, kind):
    """An algorithm that the kind of network can serve, and its name."""
    names = {"critic": ("ppo",), "scorer": ("reward_model",)}.get(kind[1], POLICIES)
    name = str(random.choice(names))
    part = registry.resolve("algorithm", name)
    return part(registry.build_config(part, {}, where=name)), name


def learned(network, reference, rows, algorithm, plan):
    """Metrics of a step, with the loss, and its gradients by parameter, in float64."""
    whole = "whole_groups" in algorithm.needs
    rows = paired(rows) if whole else rows
    if isinstance(network, ScoreNetwork):
        rows = network.placed(rows)
    if isinstance(network, ValueNetwork) and not isinstance(network, ScoreNetwork):
        passes = CriticPasses(network, rows, plan, CPU)
    else:
        apart = not algorithm.needs & ALL_ROWS_LEARN
        passes = Passes(network, rows, plan, CPU, whole_groups=whole, signal_apart=apart)
        if passes.wants_proximal(algorithm):
            passes.compute_proximal()
        if "reference_logprobs" in algorithm.needs:
            passes.compute_reference(reference)
    parameters = {name: one for name, one in network.model.named_parameters() if one.requires_grad}
    network.model.zero_grad()
    loss = sum(passes.accumulate(one, algorithm) for one in passes.minibatches)
    found = {name: one.grad.clone() for name, one in parameters.items() if one.grad is not None}
    return {**passes.metrics(algorithm), "loss": loss}, found
