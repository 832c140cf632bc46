"""The differences between two versions: `delta` has the format, `kernels` the compiled passes over weights."""
