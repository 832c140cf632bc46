"""What changed between two versions: `delta` is the format, `kernels` the compiled passes."""
