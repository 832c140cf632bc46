"""What the trainer keeps and what it deletes: checkpoints, weights, and with [retention] records of the log."""
