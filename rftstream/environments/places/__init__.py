"""Places: machines of their own for rollouts, such as containers. `base.py` has the interface.

No place is made ahead. While all may be had, one would take the room of a rollout that waits, and this makes it as
soon; while fewer are wanted, it would be of the last task, and the next is another one. Measured with 20 runnable
processes on 2 cores: a container and its relay are made in 1 to 2 s and gone in 0.35 s, a place in bubblewrap above `/`
in 0.7 to 1 s.

To add a kind: a module with a class that keeps `base.Places`, and a line here. It is built as `Class(settings:
PlaceSettings)`.
"""

PLACES = {
    "docker": "rftstream.environments.places.docker:DockerPlaces",
    "bubblewrap": "rftstream.environments.places.bubblewrap:BubblewrapPlaces",
}
"""Name of a kind, as `place = ` has it -> its class."""
