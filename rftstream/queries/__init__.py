"""Answers questions about a run. The answers come from its log and folder, never from its processes' memory.

Each view is a function from a transport (or a run) to a frozen report; `rftstream.commands.views` prints them. A report
is a `plain.Report`: it says in `JSON` what its JSON holds, and has a `to_text`. No view writes to the run.
"""
