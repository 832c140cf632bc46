"""Records in readable form: rollouts, groups, batches, dead letters, problems, weights."""
