"""Foreign code for tests, and what asks it."""

from __future__ import annotations

from rftstream.contracts.assistant import AssistantMessage, ToolCall
from rftstream.contracts.tasks import ChatMessage, Problem

PROBLEM = Problem(
    messages=(ChatMessage(role="user", content="Begin."),), answer="42", info={"level": 3}, data_source="made"
)

FOREIGN = '''
import asyncio, ctypes, json, os, signal, subprocess, sys, time

class Told:
    """Does what the policy says."""

    def __init__(self, config, *, problem, seed):
        self.config, self.problem, self.seed, self.turns = config, problem, seed, []

    def start(self):
        if "start" in self.config:
            return self.config["start"]
        return [*self.problem["messages"], {"role": "user", "content": f"seed {self.seed}"}]

    def tools(self):
        return [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]

    def reply(self, said):
        self.turns.append(said["content"])
        word, _, rest = said["content"].partition(" ")
        return getattr(self, word)(rest, said)

    def say(self, rest, said):
        return {"done": False, "messages": [rest]}

    def see(self, rest, said):
        return self.answer({"said": said, "problem": self.problem, "config": self.config, "turns": len(self.turns)})

    def where(self, rest, said):
        return self.answer({"pid": os.getpid(), "session": os.getsid(0), "parent": os.getppid(), "path": sys.path,
                            "variables": dict(os.environ), "version": sys.version_info[:2], "argv": sys.argv,
                            "modules": sorted(sys.modules), "stdin": sys.stdin.read()})

    def returned(self, rest, said):
        return eval(rest)

    def printed(self, rest, said):
        print("printed")
        os.write(1, b"written\\xff\\n")
        os.write(2, b"\\x00\\x01\\x02\\x03 to stderr\\n")
        subprocess.run(["echo", "echoed"])
        return {"done": False, "messages": ["said"]}

    def printed_much(self, rest, said):
        for number in range(int(rest)):
            print("x" * 999)
        sys.stdout.flush()
        return {"done": False}

    def large(self, rest, said):
        return {"done": False, "messages": ["x" * int(rest)]}

    def raised(self, rest, said):
        raise eval(rest)

    def forked(self, rest, said):
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
        return {"done": False, "messages": ["once"]}

    def children(self, rest, said):
        """A child, one in a session of its own, and one whose parent is gone; the last two hold on to nothing else."""
        found = [subprocess.Popen(["sleep", "1000"]).pid,
                 subprocess.Popen(["sleep", "1000"], start_new_session=True).pid]
        orphan = subprocess.run(["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 </dev/null & echo $!"],
                                capture_output=True, text=True).stdout
        return self.answer([*found, int(orphan)])

    def descriptors(self, rest, said):
        code = "import os; print(sorted(map(int, os.listdir('/proc/self/fd'))))"
        return self.answer(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                                          close_fds=False).stdout)

    def garbage(self, rest, said):
        for number in range(3, 4096):
            try:
                os.write(number, b"\\xff" * 64)
            except OSError:
                pass
        return {"done": False}

    def closed_all(self, rest, said):
        os.closerange(3, 1 << 16)  # a pipe has the number that it had where it was opened
        return {"done": False}

    def hung(self, rest, said):
        time.sleep(1000)

    def hung_with_the_lock(self, rest, said):
        ctypes.PyDLL(None).sleep(1000)

    def died(self, rest, said):
        os.kill(os.getpid(), signal.SIGKILL)

    def left(self, rest, said):
        print("about to leave", flush=True)
        os._exit(7)

    def stopped_loop(self, rest, said):
        async def stop():
            asyncio.get_running_loop().stop()
            raise SystemExit(3)
        return stop()

    def answer(self, value):
        return {"done": False, "messages": [json.dumps(value)]}


class Counter:
    """Counts, and can go on elsewhere."""

    def __init__(self, config, *, problem, seed):
        self.config, self.count = config, seed

    def start(self):
        if self.config.get("dies_at_start") and first_time(self.config["dies_at_start"]):
            os._exit(1)
        return "count"

    def reply(self, said):
        self.count += 1
        if said["content"] == "die" or said["content"] == "die once" and first_time(self.config["mark"]):
            os._exit(1)
        return {"done": said["content"] == "end", "messages": [str(self.count)], "reward": 0.5}

    def save(self):
        return self.count.to_bytes(self.config.get("state_bytes", 8), "big")

    def load(self, state):
        self.count = int.from_bytes(state, "big")


class Async:
    """Has methods that are awaited; two of them meet in one event loop."""

    arrived = []

    def __init__(self, config, *, problem, seed):
        self.closed = config.get("closed")

    async def start(self):
        await asyncio.sleep(0)
        return "hello"

    async def reply(self, said):
        if said["content"] == "hang":
            await asyncio.sleep(1000)
        Async.arrived.append(asyncio.get_running_loop())
        while len(Async.arrived) < 2:
            await asyncio.sleep(0.001)
        assert Async.arrived[0] is Async.arrived[1]
        return {"done": True}

    async def close(self):
        open(self.closed, "a").write("closed ")


def first_time(mark):
    try:
        os.mkdir(mark)
        return True
    except FileExistsError:
        return False


async def solve(problem, base_url, api_key, seed, options):
    import urllib.request
    request = urllib.request.Request(base_url + "/chat/completions", json.dumps(
        {"messages": problem["messages"], "seed": seed}).encode(), {"Authorization": "Bearer " + api_key})
    loop = asyncio.get_running_loop()
    with await loop.run_in_executor(None, urllib.request.urlopen, request) as response:
        text = json.loads(response.read())["choices"][0]["message"]["content"]
    return {"reward": float(text == problem["answer"]), "parts": {"right": 1}, "metrics": {"calls": 1, **options}}


def blocking(problem, base_url, api_key, seed):
    return seed

async def silent(problem, base_url, api_key, seed):
    pass

async def wrong(problem, base_url, api_key, seed):
    raise LookupError("no such thing")

async def odd(problem, base_url, api_key, seed):
    return "well done"

async def endless(problem, base_url, api_key, seed, options):
    open(options["mark"], "w").write("begun")
    try:
        await asyncio.sleep(1000)
    except asyncio.CancelledError:
        open(options["mark"], "w").write("cancelled")
        raise
'''


def say(content: str, **fields: object) -> AssistantMessage:
    """Return an assistant turn with this text."""
    return AssistantMessage(content=content, text=content, **fields)


CALL = ToolCall(id="call_0_0", name="add", arguments={"a": 1, "deep": [True, None]}, text='{"a": 1}')
