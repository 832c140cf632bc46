"""Converts configs and training scripts of TRL."""
