"""Tool calls and reasoning in completions, and how a given message would be written as a completion.

`tool_calls` splits completions with `families` (the package `renderers`) or with the readers in `call_blocks` and
`python_calls`, which share `call_reading`. `written_turns` goes the other way: from a message to its completion.
"""
