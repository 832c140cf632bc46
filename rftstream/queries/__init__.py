"""What can be asked of a run: read from its log and folder, never from its processes' memory, and without writing.

Each view is a function from a transport (or a run) to a frozen report; `rftstream.commands.views` prints them.
"""
