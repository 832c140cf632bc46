"""A served model of our own, which speaks as much of OpenAI's API as is used here."""

import threading

from tests.loopback import HttpServer


class Server(HttpServer):
    """Answers with the prompt's ids, one by one, or as it is told; `answers` are given first, as (status, object), or
    with headers as a third. `keeps_open`: connections stay open for further requests."""

    def __init__(self, usual=None, *, keeps_open=False):
        self.usual = usual or echo
        self.requests, self.keys, self.hosts, self.answers = [], [], [], []
        self.instead = (503, {})
        """What is answered where `usual` returns None."""
        self.hold = threading.Event()
        self.hold.set()
        super().__init__(self.told, keeps_open=keeps_open)
        self.url += "/v1"

    def told(self, asked):
        self.requests.append((asked.path, asked.value))
        self.keys.append(asked.key)
        self.hosts.append(asked.headers.get("host"))
        self.hold.wait(120)
        if self.answers:
            told = self.answers.pop(0)
        else:
            told = self.instead if (answer := self.usual(asked.value)) is None else (200, answer)
        return None if told[0] is None else told

    def close(self):
        self.hold.set()
        super().close()


def echo(body, *, ids=True):
    tokens = body["prompt"][: body["max_tokens"]]
    choice = {
        "finish_reason": "length" if len(tokens) == body["max_tokens"] else "stop", "text": "",
        "logprobs": {"tokens": [f"token_id:{one}" for one in tokens], "token_logprobs": [-one / 10 for one in tokens]},
    }  # fmt: skip
    return {"choices": [choice | ({"token_ids": tokens} if ids else {})]}
