"""The steps of the roles: messages in, messages out. `workers/` composes them from a run file's parts.

feeder: taskset -> tasks. explorer: tasks -> rollouts. verifier: rollouts -> verified. buffer: verified -> batches and
outcomes. trainer: batches -> weights and steps. evaluator: weights -> evals.
"""
