"""vLLM as a policy: its asynchronous engine in its own processes.

The explorer drives `policy`. `engine` is the asyncio side. `exchange` and `shared` bring versions of the weights into
the engine, and `worker` runs inside its processes.
"""
