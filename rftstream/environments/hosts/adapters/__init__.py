"""Adapters: environments and agents of known frameworks, as code in a host.

Each is one file that a host loads by its path. It imports only the standard library and its framework, nothing of
rftstream, and uses the plain form of `rftstream.environments.json_form`. The table is `ADAPTERS` in `hosts/pool.py`.
Its function `tasks(options)` yields the tasks of an environment, for sources such as `verifiers:ID`.
"""
