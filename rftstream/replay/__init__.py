"""Trains recorded batches again: to see that they give the same weights (`again`), or what else they give
(`branch`)."""
