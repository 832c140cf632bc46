"""Sessions with other purposes than training: evaluations, and runs that are made from recorded ones.

To add one: a module here that prepares a folder and a config, and calls `launch.session`.
"""
