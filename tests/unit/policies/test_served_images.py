"""Images in prompts that go to a server, against one of our own that puts tokens in the place of marks as vLLM does."""

import asyncio
import dataclasses
import io

import pytest
from PIL import Image

from rftstream.clock import SystemClock
from rftstream.errors import ConfigError, ImageError, PolicyError
from rftstream.models.rendering import open_renderer
from rftstream.models.vision.images import decode_data_url
from rftstream.policies.base import Constraint
from rftstream.policies.openai.images import NEVER, RESOURCE, collapsed
from rftstream.policies.openai.policy import OpenAiPolicy
from rftstream.policies.openai.updates import ServerUpdates
from rftstream.policies.served import served_parameters
from rftstream.policies.vllm.images import EngineImages, check_tokens, name_under
from rftstream.policies.vllm.worker import renamed
from tests.unit import seeing_families, tiny
from tests.unit.policies.test_images import PICTURES, image_in, prompted

pytestmark = pytest.mark.anyio

SAID = [3, 4, 5]


MODEL = {"seed": 3, "vision": True, "context": 128}


@pytest.fixture
def policy(server, spec):
    server.usual = generate
    config = OpenAiPolicy.Config(url=server.url, model="it")
    opened = OpenAiPolicy(
        config, model=spec, renderer=open_renderer(spec), clock=SystemClock(), images=tiny.images(spec)
    )
    opened.load({}, tiny.name(4))
    yield opened
    opened.close()


def generate(body, *, prompt=None, said=SAID):
    """As vLLM answers for the made model, whose images have 16 tokens."""
    if prompt is None:
        (mark,) = {int(one) for one in body["sampling_params"]["logit_bias"]}
        prompt = [token for one in body["token_ids"] for token in ([mark] * 16 if one == mark else [one])]
    content = [{"token_id": one, "logprob": -one / 10} for one in said]
    choice = {"token_ids": said, "finish_reason": "stop", "logprobs": {"content": content}}
    return {"prompt_token_ids": prompt, "choices": [choice]}


def test_images_are_sent_as_marks_with_their_pixels(server, policy, spec):
    request = prompted(spec, 0, images=PICTURES[:2], temperature=0.5, top_k=4, stop=("x",))
    request = dataclasses.replace(request, constraint=Constraint(kind="regex", value="a+"))
    completion = tiny.drain_one(policy, request)
    assert completion.token_ids.tolist() == SAID and completion.error is None
    assert completion.behavior_logprobs.tolist() == pytest.approx([-0.3, -0.4, -0.5])
    ((path, body),) = server.requests
    mark = open_renderer(spec).images.token_id
    assert path == f"/{RESOURCE}"
    assert len(body["token_ids"]) == len(request.token_ids) - 2 * 15 and body["token_ids"].count(mark) == 2
    assert [one["uuid"] for one in body["content_parts"]] == [f"{one.digest}@1/4" for one in PICTURES[:2]]
    for part, picture in zip(body["content_parts"], PICTURES, strict=False):
        sent, shown = (
            Image.open(io.BytesIO(decode_data_url(url))).convert("RGB") for url in (part["url"], picture.url)
        )
        assert sent.tobytes() == shown.tobytes()
    sampling = body["sampling_params"]
    assert sampling["logit_bias"] == {str(mark): NEVER}
    assert (sampling["temperature"], sampling["top_k"], sampling["stop"]) == (0.5, 4, ["x"])
    assert sampling["structured_outputs"] == {"regex": "a+"}
    assert body.keys() == {"model", "token_ids", "content_parts", "sampling_params", "return_token_ids"}


def test_a_prompt_without_images_samples_no_placeholder_either(server, policy, spec):
    tiny.drain_one(policy, prompted(spec, 0, images=[]))
    ((_, body),) = server.requests
    assert "content_parts" not in body and body["sampling_params"]["logit_bias"]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda body: generate(body, prompt=body["token_ids"]), "a prompt of 5 tokens, expected 20; the first that"),
        (lambda body: {**generate(body), "prompt_token_ids": None}, "did not say which tokens"),
        (lambda body: generate(body, said=[3, 1]), "sampled 1, which stands for an image"),
        (lambda body: {"choices": [{**generate(body)["choices"][0], "logprobs": None}],
                       "prompt_token_ids": generate(body)["prompt_token_ids"]}, "0 logprobs for 3 tokens"),
    ],
    ids=["other prompt", "no prompt", "placeholder", "no logprobs"],
)  # fmt: skip
def test_what_a_server_must_not_answer(server, policy, spec, answer, says):
    server.usual = answer
    completion = tiny.drain_one(policy, prompted(spec, 0))
    assert completion.finish_reason == "error" and says in completion.error


def test_images_that_cannot_be_shown_end_their_request_alone(server, policy, spec):
    good = prompted(spec, 0)
    (span,) = good.images
    bad = dataclasses.replace(good, request_id="bad", images=(dataclasses.replace(span, image=image_in(b"no image")),))
    policy.submit(good)
    policy.submit(bad)
    done = tiny.drain(policy)
    assert done["r0"].error is None and "is no image" in done["bad"].error


def test_a_server_without_the_endpoint_is_told_of(server, policy, spec):
    server.answers.append((404, {"error": {"message": "Not Found"}}))
    policy.submit(prompted(spec, 0))
    with pytest.raises(PolicyError, match=r"404: Not Found.*--enable-scale-out; the policies 'hf' and 'vllm'"):
        tiny.drain(policy)


def test_new_weights_let_vllm_forget_what_it_made_of_images(server, spec, tmp_path):
    text = tiny.make(tmp_path / "text")
    for one, paths in ((spec, 3), (text, 2)):
        updates = ServerUpdates(
            "vllm-cpu",
            folder=str(tmp_path),
            urls=[server.url],
            api_key=None,
            timeout_s=60,
            tries=1,
            section="x",
            model=one,
        )
        assert len(updates._servers[server.url]) == len(updates._requests) == paths
        updates.close()
    parameters, _ = served_parameters(spec)
    assert any(name.startswith("model.vision_tower.") for name in parameters)


@pytest.mark.parametrize("kind", sorted(seeing_families.FAMILIES))
def test_a_mark_stands_in_the_place_of_all_tokens_of_an_image(kind, tmp_path):
    spec = seeing_families.made(kind, tmp_path / "model")
    tokens = open_renderer(spec).images
    request = prompted(spec, 0, images=PICTURES[:2], text="a<image>b<image>")
    found = collapsed(request.token_ids, request.images, tokens)
    assert found.count(tokens.mark_id) == 2
    before, behind = tokens.around(PICTURES[0])
    taken = sum(span.count for span in request.images) + 2 * (before + behind)
    assert len(found) == len(request.token_ids) - taken + 2
    if tokens.token_id != tokens.mark_id:
        assert tokens.token_id not in found
    (first, *_) = request.images
    cut = dataclasses.replace(first, count=len(request.token_ids))
    with pytest.raises(ImageError, match="are not in the prompt"):
        collapsed(request.token_ids, [cut], tokens)


class Place:
    def __init__(self, offset, length, is_embed=None):
        self.offset, self.length, self.is_embed = offset, length, is_embed


def test_tokens_of_an_image_are_those_of_vllm(spec):
    images = EngineImages(tiny.images(spec), open_renderer(spec).images)
    assert images._between([7, 1, 1, 8], Place(1, 2), PICTURES[0]) == (1, 1)
    with pytest.raises(ConfigError, match="in the place of 3 tokens of which 2 are placeholders 1"):
        images._between([7, 1, 1, 8], Place(1, 3), PICTURES[0])
    check_tokens([1, 1], [1, 1], PICTURES[0])
    with pytest.raises(ImageError, match=r"has 2 tokens in the prompt, expected the 3 that vllm makes of it; use"):
        check_tokens([1, 1], [1, 1, 1], PICTURES[0])
    with pytest.raises(ImageError, match="the first that differs is number 1"):
        check_tokens([1, 2, 1], [1, 1, 1], PICTURES[0])


class Renderer:
    """As much of vLLM's as is asked of it: 16 tokens for each image."""

    def __init__(self):
        self.asked = []

    async def render_cmpl_async(self, prompts):
        ((mark,), (picture,), (digest,)) = [
            prompts[0]["prompt_token_ids"], prompts[0]["multi_modal_data"]["image"],
            prompts[0]["multi_modal_uuids"]["image"],
        ]  # fmt: skip
        self.asked.append(digest)
        if len(self.asked) == 3:
            raise ValueError("too small")
        return [{
            "prompt_token_ids": [mark] * 16, "mm_kwargs": {"image": [picture.size]},
            "mm_placeholders": {"image": [Place(0, 16)]},
        }]  # fmt: skip


async def test_vllm_prepares_each_image_once(spec):
    images, renderer = EngineImages(tiny.images(spec), open_renderer(spec).images), Renderer()
    shown = prompted(spec, 0, images=PICTURES[:2]).images
    both = await asyncio.gather(*(images.prepare(shown, renderer) for _ in range(3)))
    assert all(one == both[0] for one in both) and both[0][0].token_ids == (1,) * 16
    third = prompted(spec, 2).images
    for expected in ("vllm refused it: ValueError: too small", None):
        if expected is None:
            assert len(await images.prepare(third, renderer)) == 1
        else:
            with pytest.raises(ImageError, match=f"{PICTURES[2].digest}: {expected}"):
                await images.prepare(third, renderer)
    assert renderer.asked == [PICTURES[n].digest for n in (0, 1, 2, 2)]


def test_what_is_kept_of_an_image_is_of_one_version():
    assert name_under(PICTURES[0], "1/3") == f"{PICTURES[0].digest}@1/3"


def test_a_towers_weights_are_named_as_the_loader_knows_them():
    known = ["vision_tower.vision_model.embeddings.class_embedding", "language_model.lm_head.weight"]
    assert renamed("model.vision_tower.pre.weight", known) == "model.vision_tower.vision_model.pre.weight"
    assert renamed("vision_tower.vision_model.pre.weight", known) == "vision_tower.vision_model.pre.weight"
    assert renamed("model.language_model.norm.weight", known) == "model.language_model.norm.weight"
    assert renamed("model.vision_tower.pre.weight", known[1:]) == "model.vision_tower.pre.weight"
