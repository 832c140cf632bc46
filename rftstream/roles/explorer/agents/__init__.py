"""Rollouts that agents make by calling the gateway.

`step` is an explorer that agents call, `loop` the agent loop, `session` a rollout that an agent is making, `launcher`
starts agents."""
