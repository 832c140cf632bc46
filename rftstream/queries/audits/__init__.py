"""Conservation, counted from the log: every admitted rollout and group has exactly one fate."""
