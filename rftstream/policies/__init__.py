"""Policies: inference engines that follow the trainer's weights.

To add one: a module with a class that keeps `rftstream.policies.base.Policy` and has a `Config`, and a line here.
It is built as `Class(config: Class.Config, *, model: ModelSpec, renderer: Renderer, clock: Clock)`.
"""

POLICIES = {
    "hf": "rftstream.policies.hf:HfPolicy",
    "vllm": "rftstream.policies.vllm:VllmPolicy",
    "openai": "rftstream.policies.openai:OpenAiPolicy",
    "fake": "rftstream.policies.fake:FakePolicy",
}
