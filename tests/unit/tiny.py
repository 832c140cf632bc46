"""What the tests of models, policies and backends share: a made model, and rows and requests for it."""

import numpy as np

from rftstream.algorithms.base import TrainingRow
from rftstream.backends.base import OptimizerSettings, UpdatePlan
from rftstream.backends.torch.backend import TorchBackend
from rftstream.clock import SystemClock
from rftstream.config.sections import MakeModel, ModelSection
from rftstream.contracts.tasks import Sampling
from rftstream.contracts.versions import VersionName
from rftstream.models.folders.folder import prepare_model
from rftstream.models.rendering import open_renderer
from rftstream.models.vision.image_tokens import image_cache
from rftstream.models.vision.images import decode_data_url
from rftstream.policies.base import SampleRequest
from rftstream.policies.hf.policy import HfPolicy

VOCABULARY = 17
"""The end, and the characters of a made model, `0` from 1 on."""


def make(folder, *, dtype="float32", seed=0, **settings):
    return prepare_model(ModelSection(make=MakeModel(**{"width": 32, **settings}), dtype=dtype), folder / "tiny", seed)


def images(spec):
    """An ImageCache of images that stand in their references."""
    return image_cache(spec.folder, lambda media: decode_data_url(media.url))


def backend(spec, **config):
    opened = TorchBackend(
        TorchBackend.Config(**config), model=spec, optimizer=OptimizerSettings(), seed=0, images=images(spec)
    )
    opened.open()
    return opened


def plan(**changes):
    settings = {"lr": 1e-2, "minibatches": 1, "updates_per_batch": 1, "max_grad_norm": 1.0,
                "tokens_per_microbatch": 16384}  # fmt: skip
    return UpdatePlan(**{**settings, **changes})


def rows(count=12, seed=0, *, longest=14, siblings=3):
    random = np.random.default_rng(seed)
    result = []
    for number in range(count):
        length = int(random.integers(4, longest))
        mask = np.zeros(length, np.float32)
        mask[int(random.integers(1, length - 1)) :] = 1
        mask[int(random.integers(1, length))] = 0
        result.append(TrainingRow(
            token_ids=random.integers(0, VOCABULARY, length).astype(np.int32), loss_mask=mask,
            behavior_logprobs=np.where(mask, -2.9 + 0.2 * random.standard_normal(length), np.nan).astype(np.float32),
            advantages=np.full(length, random.standard_normal(), np.float32), group=number // siblings,
        ))  # fmt: skip
    return result


def state(opened):
    return {name: bytes(tensor.data) for name, tensor in opened.served_tensors().items()}


def whole_state(opened, folder):
    """Every byte that `save` writes."""
    folder.mkdir()
    opened.save(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def policy(spec, tensors=None, records=(), **config):
    renderer = open_renderer(spec)
    settings = HfPolicy.Config(**config)
    result = HfPolicy(settings, model=spec, renderer=renderer, clock=SystemClock(), images=images(spec),
                      records=frozenset(records))  # fmt: skip
    if tensors is not None:
        result.load(tensors, name(0))
    return result


def name(version, epoch=1):
    return VersionName(trainer_epoch=epoch, version=version)


def request(number, prompt=(4, 11, 5, 15), *, max_tokens=8, **sampling):
    return SampleRequest(
        request_id=f"r{number}", token_ids=tuple(prompt), sampling=Sampling(**{"max_tokens": max_tokens, **sampling}),
        seed=1000 + number, max_tokens=max_tokens,
    )  # fmt: skip


def drain(opened):
    done = {}
    while opened.num_active:
        done.update((one.request_id, one) for one in opened.step())
    return done


def drain_one(opened, one):
    opened.submit(one)
    return drain(opened)[one.request_id]
