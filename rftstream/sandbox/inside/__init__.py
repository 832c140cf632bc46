"""The side of the sandbox that runs inside of it, or on the way in. These modules use the standard library alone: the
interpreter in the sandbox has nothing else. To add a way to run a program: a function in `programs.MODES`."""
