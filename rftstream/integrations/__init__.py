"""Integrations with other tools: Label Studio, Data-Juicer, SLURM, tracing systems, Prometheus, configs of other
trainers.

To add one: a module here, and a command in `commands` that calls it.
"""
