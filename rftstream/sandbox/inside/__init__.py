"""The code that runs inside the sandbox, or while it is set up. These modules use only the standard library, since the
interpreter in the sandbox has nothing else. To add a way to run a program, add a function to `programs.MODES`."""
