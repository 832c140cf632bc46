"""Weights: snapshots, the object store, the publisher and the follower of versions, and checkpoints."""
