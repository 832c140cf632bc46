"""Places: machines of their own for rollouts, such as containers. `base.py` has the interface.

No place is made ahead. While all may be had, one would take the room of a rollout that waits, and this makes it as
soon; while fewer are wanted, it would be of the last task, and the next is another one. Measured with 20 runnable
processes on 2 cores: a container and its relay are made in 1 to 2 s and gone in 0.35 s, a place in bubblewrap above `/`
in 0.7 to 1 s.

No place can be saved. `docker commit` has its files (in 0.2 s, or 1.8 s and 105 MB where 105 MB were written, at load
11), but not the agent that ran in it: that one starts again, and its commands, of which the log has every answer, would
run a second time on top of their own effects. What they print would differ, and no recorded call answer the next.

To add a kind: a module with a class that keeps `base.Places`, and a line here. It is built as `Class(settings:
PlaceSettings)`.
"""

PLACES = {
    "docker": "rftstream.environments.places.docker:DockerPlaces",
    "kubernetes": "rftstream.environments.places.kubernetes:KubernetesPlaces",
    "bubblewrap": "rftstream.environments.places.bubblewrap:BubblewrapPlaces",
}
"""Name of a kind, as `place = ` has it -> its class."""
