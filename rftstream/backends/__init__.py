"""Backends.

To add one: a module with a class that has a `Config` and keeps `rftstream.backends.base.Backend`, and a line here.
"""

from rftstream.config.parts.part_specs import ARCHITECTURE, BackendSpec

BACKENDS = {
    "torch": BackendSpec(
        "rftstream.backends.torch.backend:TorchBackend",
        loads_model=True,
        leaves_device=True,
        needs_peft=True,
        quantizes=True,
        trains_classifiers=True,
        is_estimated=True,
        takes_images=True,
        forces_experts=True,
        preload=(
            "torch",
            "transformers",
            ARCHITECTURE,
            "transformers.models.auto.modeling_auto",
            "rftstream.backends.torch.critic",
            "rftstream.backends.torch.lora",
            "rftstream.backends.torch.scorer",
        ),
    ),
    "deepspeed": BackendSpec(
        "rftstream.backends.deepspeed.backend:DeepSpeedBackend",
        loads_model=True,
        leaves_device=True,
        processes_setting="processes",
        needs_peft=True,
        is_estimated=True,
        takes_images=True,
        forces_experts=True,
    ),
    "fake": BackendSpec("rftstream.backends.fake:FakeBackend", leaves_device=True),
    "joined": BackendSpec("rftstream.backends.joined:JoinedBackend", is_joined=True),
}
