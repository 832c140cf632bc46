"""Backends.

To add one: a module with a class that has a `Config` and keeps `rftstream.backends.base.Backend`, and a line here.
"""

BACKENDS = {
    "torch": "rftstream.backends.torch.backend:TorchBackend",
    "deepspeed": "rftstream.backends.deepspeed.backend:DeepSpeedBackend",
    "fake": "rftstream.backends.fake:FakeBackend",
}
