"""Policies: inference engines that follow the trainer's weights.

To add one, write a module with a class that implements `rftstream.policies.base.Policy` and has a `Config`, and add a
line here. The class is built as `Class(config: Class.Config, *, model: ModelSpec, renderer: Renderer, clock: Clock)`.
"""

from rftstream.config.parts.part_specs import ARCHITECTURE, PolicySpec
from rftstream.contracts.token_values import ALLOWED, EXPERTS

POLICIES = {
    "hf": PolicySpec(
        "rftstream.policies.hf.policy:HfPolicy",
        loads_model=True,
        sleeps=True,
        says_load=True,
        is_estimated=True,
        takes_images=True,
        records=(ALLOWED, EXPERTS),
        constrains=True,
        preload=(
            "torch",
            "transformers",
            ARCHITECTURE,
            "transformers.models.auto.modeling_auto",
            "rftstream.policies.hf.attention",
            "rftstream.policies.hf.batch",
        ),
    ),
    "vllm": PolicySpec(
        "rftstream.policies.vllm.policy:VllmPolicy",
        loads_model=True,
        reads_shared=True,
        sleeps=True,
        says_load=True,
        takes_images=True,
        constrains=True,
        records=(ALLOWED, EXPERTS),
        lists_sets=True,
        preload=("torch", "transformers", ARCHITECTURE),
    ),
    "openai": PolicySpec(
        "rftstream.policies.openai.policy:OpenAiPolicy",
        takes_weights=False,
        takes_images=True,
        constrains=True,
        update_setting="update",
        says_load=True,
    ),
    "fake": PolicySpec("rftstream.policies.fake:FakePolicy", sleeps=True, says_load=True),
    "joined": PolicySpec("rftstream.policies.joined:JoinedPolicy", is_joined=True),
}
