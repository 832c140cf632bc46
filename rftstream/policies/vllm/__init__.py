"""vLLM as a policy: its asynchronous engine in processes of its own.

`policy` is what the explorer drives, `engine` the side that speaks asyncio, `exchange` and `shared` bring versions of
the weights into the engine, and `worker` runs inside of its processes.
"""
