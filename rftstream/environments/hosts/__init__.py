"""Hosts: processes with an interpreter of their own, for environments and agents whose packages this one cannot have.

A rollout's environment, or an agent's run, lives in a host process. Calls go there as frames, and answers come back:

    explorer                      guard.py                       runner.py, in the other interpreter
    pool.py -> host.py  --------- starts it, and ends it ------> imports the code, and calls it
                        ==== requests and answers: two pipes of their own ====>

`json_form.py`, one folder up, says what the code gets and returns. `adapters/` has the code for known frameworks.
To add an adapter: a module there that imports the standard library and the framework alone, and a line in its table.
"""
