"""The endpoint for other people's agents: OpenAI's chat completions and responses, Anthropic's messages.

`server` speaks HTTP and checks keys (`keys`). A dialect (`dialects/`) reads a request and writes its answer. The
explorer's agent loop (`roles/explorer/agents/loop.py`) samples, commits, and only then returns the answer.
"""
