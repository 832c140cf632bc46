"""Tool calls and thoughts in what a policy wrote, and in what it would have written.

`tool_calls` takes completions apart, by `families` (the package `renderers`) or by the readers of `call_blocks` and
`python_calls`, which share `call_reading`. `written_turns` goes the other way.
"""
