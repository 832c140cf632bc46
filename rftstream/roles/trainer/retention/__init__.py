"""Retention by the trainer: checkpoints, weights, and with [retention] records of the log."""
