"""Places: machines of their own for rollouts, such as containers. `base.py` has the interface.

To add a kind: a module with a class that keeps `base.Places`, and a line here. It is built as `Class(settings:
PlaceSettings)`.
"""

PLACES = {
    "docker": "rftstream.environments.places.docker:DockerPlaces",
    "bubblewrap": "rftstream.environments.places.bubblewrap:BubblewrapPlaces",
}
"""Name of a kind, as `place = ` has it -> its class."""
