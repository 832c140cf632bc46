"""Records as people read them: rollouts, groups, batches, dead letters, problems, weights."""
