"""A served model of our own, which speaks as much of OpenAI's API as is used here."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """Answers with the prompt's ids, one by one, or as it is told; `answers` are given first, as (status, object)."""

    def __init__(self, usual=None):
        self.usual = usual or echo
        self.requests, self.keys, self.answers = [], [], []
        self.hold = threading.Event()
        self.hold.set()
        handler = type("Handler", (_Handler,), {"owner": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self):
        self.hold.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.owner.requests.append((self.path, body))
        self.owner.keys.append(self.headers.get("Authorization"))
        self.owner.hold.wait(120)
        status, answer = self.owner.answers.pop(0) if self.owner.answers else (200, self.owner.usual(body))
        if status is None:
            self.close_connection = True  # without a word
            return
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            pass  # aborted

    def log_message(self, *arguments):
        pass


def echo(body, *, ids=True):
    tokens = body["prompt"][: body["max_tokens"]]
    choice = {
        "finish_reason": "length" if len(tokens) == body["max_tokens"] else "stop", "text": "",
        "logprobs": {"tokens": [f"token_id:{one}" for one in tokens], "token_logprobs": [-one / 10 for one in tokens]},
    }  # fmt: skip
    return {"choices": [choice | ({"token_ids": tokens} if ids else {})]}
