"""Served models as a policy: any servers with OpenAI's completions.

`policy` is what the explorer drives, `asking` its threads, `engine` one of the servers, `completions` the form of
requests and answers, `routing` the choice of a server, and `updates` brings new weights to them.
"""
