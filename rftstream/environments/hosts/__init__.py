"""Hosts: processes with their own interpreter, for environments and agents whose packages cannot be installed here.

A rollout's environment, or an agent's run, lives in a host process. Calls go there as frames, and answers come back:

    explorer                      guard.py                       runner.py, in the other interpreter
    pool.py -> host.py  --------- starts it, and ends it ------> imports the code, and calls it
    ==== requests and answers: two separate pipes =========>

`json_form.py`, one folder up, defines the arguments and results of the code. `adapters/` has the code for known
frameworks. To add an adapter, write a module there that imports only the standard library and the framework, and add a
line to its table.
"""
