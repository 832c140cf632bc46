"""Weights: snapshots, the object store they lie in, who publishes and who follows them, and checkpoints."""
