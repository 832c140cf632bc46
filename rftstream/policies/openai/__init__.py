"""Served models as a policy: any servers with OpenAI's completions.

The explorer drives `policy`. `asking` has its threads, `engine` one of the servers, `completions` the form of requests
and answers, `routing` the choice of a server. `updates` brings new weights to the servers.
"""
