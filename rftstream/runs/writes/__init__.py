"""Writes from people and programs to a run, each exactly once."""
