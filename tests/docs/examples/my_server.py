"""The game behind HTTP: `python my_server.py PORT`. A server in any language can do the same."""

import json
import sys
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from my_games import HotOrCold

GAMES = {}
ANSWERED = {}


def answer(resource, body):
    if resource in ("/start", "/load"):
        session = uuid.uuid4().hex
        GAMES[session] = HotOrCold(body["options"], problem=body["problem"], seed=body["seed"])
        if resource == "/load":
            GAMES[session].load(body["state"])
            return 200, {"session": session, "state": body["state"]}
        return 200, {"session": session, "messages": GAMES[session].start(), "state": GAMES[session].save()}
    game = GAMES.get(body["session"])
    if game is None:
        return 404, {"error": "no such session"}
    if resource == "/close":
        del GAMES[body["session"]]
        return 200, {}
    turn, kept = ANSWERED.get(body["session"], (0, None))
    if turn != body["turn"]:  # else it was sent again, since the answer was lost
        kept = {"reply": game.reply(body["said"]), "state": game.save()}
        ANSWERED[body["session"]] = (body["turn"], kept)
    return 200, kept


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, value = answer(self.path, body)
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    print(f"serving on http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()
