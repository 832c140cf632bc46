"""The endpoint for agents that others wrote: OpenAI's chat completions and responses, Anthropic's messages.

`server` speaks HTTP and checks keys (`keys`); a dialect (`dialects/`) reads a request and writes its answer; the
explorer's agent loop (`roles/explorer/agents/loop.py`) samples, commits, and only then hands the answer out.
"""
