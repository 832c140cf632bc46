"""Rollouts that agents make by calling the gateway.

`step` is an explorer that agents call, `loop` the agent loop, `session` one rollout in the making, `launcher` what
starts agents.
"""
