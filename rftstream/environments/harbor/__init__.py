"""Tasks of Harbor: a place for each rollout, an agent in it, and the task's own tests. `agent.py` runs them.

To add a harness: an entry in `harnesses.HARNESSES`.
"""
