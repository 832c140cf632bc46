"""Trains recorded batches again: to check that the weights are the same (`again`), or to try other settings
(`branch`)."""
