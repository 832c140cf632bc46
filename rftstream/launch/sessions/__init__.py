"""Other sessions than a whole run's: evaluations, runs made from recorded ones, and the workers of one host of several.

To add one: a module here that prepares a folder and a config, and calls `launch.session`.
"""
