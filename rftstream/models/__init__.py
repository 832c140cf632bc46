"""The model of a run: its folder, its tokenizer and chat template, and models that other servers hold.

In the order of reading:

    spec            what engines and backends are told about the model
    folders.folder  how a model folder is found or fetched, checked, and identified by digests
    folders.made, folders.files  small models that are made on the spot; JSON files and digests of a folder
    rendering       from messages to token ids and back
    tokenizer       the tokenizer of a folder; chat_template: the template, and how it takes calls and reasoning
    splice          the tokens of the next turn; sampled tokens are never tokenised again
    calls.tool_calls  splits completions into text, reasoning and calls; families: by the package `renderers`
    devices         checks that a device is on this machine
    server_client   a client of model servers that speak OpenAI's API
    folders.convert, folders.hub  model folders from models inside packages, and onto a hub

To add another kind of made or converted model, write a module beside `made` or `convert` and add a branch in
`folder.prepare_model`.
"""
