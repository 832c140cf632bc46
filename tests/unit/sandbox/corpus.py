"""Hostile programs, and honest ones that look odd. Each attack must fail; each probe prints what it reached."""

EXPECTED = "42"


ATTACKS = {
    "exit early": "import os; os._exit(0)",
    "exit by sys": "import sys; sys.exit(0)",
    "exit by signal": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "thread bomb": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()",
    "print for ever": "while True: print('x' * 1000)",
    "print errors for ever": "import sys\nwhile True: sys.stderr.write('x' * 1000)",
    "fill the disk": "f = open('/tmp/x', 'wb')\nwhile True: f.write(bytes(1 << 20))",
    "many files": "import itertools\nfor i in itertools.count(): open(f'/tmp/{i}', 'w').close()",
    "fill shared memory": "f = open('/dev/shm/x', 'wb')\nwhile True: f.write(bytes(1 << 20))",
    "balloon": "held = []\nwhile True: held.append(bytearray(1 << 22))",
    "balloon of memory files": (
        "import os\n"
        "held = []\n"
        "while True:\n"
        "    fd = os.memfd_create('x'); os.write(fd, bytes(1 << 22)); held.append(fd)"
    ),
    "many balloons": (
        "import os, time\n"
        "for _ in range(8):\n"
        "    if os.fork() == 0:\n"
        "        held = bytearray(200 << 20)\n"
        "        for i in range(0, len(held), 4096): held[i] = 1\n"
        "        time.sleep(99)\n"
        "time.sleep(99)"
    ),
    "sleep": "import time; time.sleep(1000); print(42)",
    "spin": "while True: pass",
    "spin in C": "sum(range(10 ** 14))",
    "huge power": "print(len(str(9 ** 9 ** 9)))",
    "deep recursion": "import sys; sys.setrecursionlimit(10 ** 9)\ndef f(n): return f(n + 1) + 1\nprint(f(0))",
    "stack overflow": "import ctypes\nexec('(' * 90 + ')' * 90)\nctypes.string_at(0)",
    "core dump": "import os; os.abort()",
    "patch builtins": (
        "import builtins\nbuiltins.compare = lambda *a: True\nbuiltins.print = lambda *a: None\nprint(42)"
    ),
    "patch the frame": "import sys\nf = sys._getframe()\nwhile f: f.f_globals['expected'] = ''; f = f.f_back",
    "close stdout": "import os; os.close(1); print(42)",
    "exit function that fails": "import atexit, os\nprint(42)\natexit.register(os._exit, 3)",
    "thread that stays": (
        "import threading, time\n"
        "print(42)\n"
        "def go():\n"
        "    while True: time.sleep(1)\n"
        "threading.Thread(target=go).start()"
    ),
    "signals to all": (
        "import os, signal\nos.kill(-1, signal.SIGKILL)\nos.kill(1, signal.SIGKILL)\nos.kill(os.getppid(), 15)"
    ),
    "own end": "raise SystemExit('42')",
    "kill the parent": (
        "import os, signal\nfor s in range(1, 65):\n    try: os.kill(1, s)\n    except OSError: pass\nprint(41)"
    ),
    "string that cannot be shown": "class E(Exception):\n    def __str__(self): raise E\nraise E",
    "trace": "import sys\nsys.settrace(lambda *a: sys.exit(0))\ndef f(): pass\nf(); print(42)",
    "limits of process 1": (
        "import resource\nfor limit in range(16):\n    try: resource.prlimit(1, limit, (0, 0))\n"
        "    except OSError: pass"
    ),
    "children that nobody waits for": (
        "import os, signal, time\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "for _ in range(8):\n"
        "    if os.fork() == 0:\n"
        "        while True:\n"
        "            if os.fork() == 0:\n"
        "                until = time.monotonic() + 0.03\n"
        "                while time.monotonic() < until: pass\n"
        "                os._exit(0)\n"
        "            time.sleep(0.03)\n"
        "while True: pass"
    ),
    "descriptors in flight": (
        "import array, socket\n"
        "a, b = socket.socketpair()\n"
        "held = array.array('i', [0, 1, 2, a.fileno(), b.fileno()])\n"
        "for end in (a, b): end.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, held)])\n"
        "print(41)"
    ),
    "null bytes": "print('42\\0')",
    "syntax": "def (",
    "not text": "\ud800print(42)",
}
"""Programs that must not pass when they should print EXPECTED."""


PROBES = {
    "network": (
        "\n"
        "import socket\n"
        "def go(family, kind, address):\n"
        "    try:\n"
        '        s = socket.socket(family, kind); s.settimeout(2); s.connect(address); return "reac'
        'hed"\n'
        '    except OSError: return "no"\n'
        'print(go(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", PORT)), go(socket.AF_INET, sock'
        'et.SOCK_DGRAM, ("8.8.8.8", 53)),\n'
        '      go(socket.AF_UNIX, socket.SOCK_STREAM, "\\0rftstream-probe"))\n'
    ),
    "files of others": (
        "\n"
        "import os\n"
        'for path in ("/root/.ssh", "/home", "/work", "/etc/passwd", "/etc/shadow", "SECRET", "/pro'
        'c/1/environ", "/proc/1/mem", "/var"):\n'
        "    try:\n"
        "        open(path).read() if not os.path.isdir(path) else os.listdir(path)\n"
        '    except OSError: print("no", end=" ")\n'
        '    else: print("reached", path, end=" ")\n'
    ),
    "environment": "import os; print('no' if 'RFTSTREAM_PROBE' not in str(os.environ) else 'reached')",
    "processes": (
        "\n"
        "import os\n"
        'own = {name for name in os.listdir("/proc") if name.isdigit()}\n'
        'print("no" if own == {"1", str(os.getpid())} else own)\n'
    ),
    "descriptors": (
        "\n"
        "import os\n"
        "found = []\n"
        "for fd in range(3, 300):\n"
        "    try: os.fstat(fd); found.append(fd)\n"
        "    except OSError: pass\n"
        'print(found or "no")\n'
    ),
    "writes": (
        "\n"
        "import os\n"
        'for path in ("/usr/x", "/x", "/dev/x", "/sandbox/x", "/etc/x", "/proc/sys/kernel/core_patt'
        'ern", "/proc/sysrq-trigger"):\n'
        '    try: open(path, "w").write("x")\n'
        '    except OSError: print("no", end=" ")\n'
        '    else: print("reached", path, end=" ")\n'
    ),
    "calls": (
        "\n"
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "for number, arguments in ((101, (0, 0, 0, 0)), (101, (16, 1, 0, 0)), (272, (0x10000000,)),"
        " (272, (0x20000,)), (165, (0, 0, 0, 0, 0)),\n"
        "                          (250, (0, 0, 0)), (321, (0, 0, 0)), (425, (8, 0)), (105, (0,)), "
        "(308, (0, 0)), (310, (1, 0, 0, 0, 0, 0)),\n"
        "                          (56, (0x10000011, 0, 0, 0, 0)), (435, (0, 0)), (304, (0, 0, 0)),"
        " (29, (0, 4096, 0o1600)), (161, (0,))):\n"
        '    if libc.syscall(number, *arguments) >= 0: print("reached", number, end=" ")\n'
        '    else: print("no", end=" ")\n'
    ),
    "capabilities": (
        "\n"
        'print("no" if all(set(line.split()[1]) == {"0"} for line in open("/proc/self/status") if l'
        'ine.startswith("Cap")) else "reached")\n'
    ),
    "priority": (
        "\n"
        "import os\n"
        'try: os.nice(-1); print("reached")\n'
        'except OSError: print("no")\n'
        'try: os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)); print("reached")\n'
        'except OSError: print("no")\n'
    ),
    "setuid": (
        "\n"
        "import os, subprocess\n"
        'found = [p for p in ("/usr/bin/su", "/usr/bin/passwd", "/usr/bin/mount") if os.path.exists'
        "(p)]\n"
        'print("no" if os.getuid() == os.geteuid() == 1000 else "reached")\n'
        'try: os.setuid(0); print("reached")\n'
        'except OSError: print("no")\n'
    ),
    "memory of process 1": (
        "\n"
        "import ctypes\n"
        'for name in ("maps", "mem", "environ", "fd"):\n'
        "    try:\n"
        "        import os\n"
        '        os.listdir("/proc/1/fd") if name == "fd" else open(f"/proc/1/{name}", "rb").read(1'
        "0)\n"
        '    except OSError: print("no", end=" ")\n'
        '    else: print("reached", name, end=" ")\n'
    ),
    "what is left": (
        "\n"
        "import os\n"
        'left = [name for place in ("/box", "/tmp", "/dev/shm") for name in os.listdir(place) if na'
        'me not in (".tmp", ".shm", "program.py")]\n'
        'for place in ("/box", "/tmp", "/dev/shm"): open(place + "/left", "w").close()\n'
        'print("no" if not left else left)\n'
    ),
}
"""Programs that print `no` for everything that they could not reach. PORT and SECRET are replaced."""


HONEST = {
    "plain": "print(6 * 7)",
    "input": "print(int(input()) + 1)",
    "all input": "import sys; data = sys.stdin.buffer.read().split(); print(int(data[0]) + 1)",
    "device": "print(int(open('/dev/stdin').read()) + 1)",
    "descriptor": "print(int(open(0).readline()) + 1)",
    "recursion": (
        "import sys\n"
        "sys.setrecursionlimit(10 ** 6)\n"
        "def f(n): return 0 if n == 0 else 1 + f(n - 1)\n"
        "print(f(50000) - 49958)"
    ),
    "threads": (
        "import threading\nx = []\nt = threading.Thread(target=x.append, args=(42,)); t.start(); t.join(); print(x[0])"
    ),
    "thread stack": (
        "import threading, sys\n"
        "threading.stack_size(64 << 20)\n"
        "t = threading.Thread(target=lambda: print(42)); t.start(); t.join()"
    ),
    "files": "open('a', 'w').write('42'); print(open('a').read())",
    "temporary": (
        "import tempfile\nwith tempfile.TemporaryFile() as f: f.write(b'42'); f.seek(0); print(f.read().decode())"
    ),
    "exit": "print(42); exit()",
    "exit code none": "import sys\nprint(42)\nsys.exit()",
    "main": "if __name__ == '__main__': print(42)",
    "dataclass": "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 42\nprint(A().x)",
    "child": (
        "import subprocess, sys\n"
        "print(subprocess.run([sys.executable, '-c', 'print(42)'], capture_output=True, text=True)."
        "stdout)"
    ),
    "pool": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(4) as p: print(sum(p.map(int, ['40', '2'])))"
    ),
    "atexit": "import atexit\natexit.register(print, 42)",
    "asyncio": "import asyncio\nasync def go(): await asyncio.sleep(0); print(42)\nasyncio.run(go())",
    "big int": "print(len(str(10 ** 4000)) - 3959)",
    "number form": "print('42.0')",
    "trailing space": "print('42  ')\nprint()",
    "unicode": "s = 'ü'; print(42 if len(s) == 1 else s)",
    "daemon thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start(); print(42)"
    ),
    "output by its path": "open('/dev/stderr', 'w').write('x'); open('/dev/stdout', 'w').write('42')",
    "closed stdout": "import sys\nprint(42); sys.stdout.close()",
    "no stdout": "import sys\nprint(42, flush=True); sys.stdout = None",
    "byte order mark": "\ufeffprint(42)",
    "threads at once": (
        "import threading, time\n"
        "threads = [threading.Thread(target=time.sleep, args=(0.2,)) for _ in range(40)]\n"
        "for t in threads: t.start()\n"
        "for t in threads: t.join()\n"
        "print(len(threads) + 2)"
    ),
    "process pool": (
        "from multiprocessing import Pool\n"
        "def f(x): return x * 2\n"
        "if __name__ == '__main__':\n"
        "    with Pool(2) as p: print(sum(p.map(f, [20, 1])))"
    ),
    "own limits": "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (99, 99)); print(42)",
    "daemon process": "import os, time\nprint(42, flush=True)\nif os.fork() == 0: time.sleep(1000)",
}
"""Programs that pass with the input 41."""


HOSTILE_FUNCTIONS = {
    "equal to all": (
        "class E:\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\ndef f(x): return E()"
    ),
    "int equal to all": (
        "class I(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\ndef f(x): return I(7)"
    ),
    "int that says another": "class I(int):\n    def __int__(self): return 42\ndef f(x): return I(1)",
    "float that says another": (
        "class F(float):\n    def __float__(self): return 42.0\n    def hex(self): return '42'\ndef f(x): return F(1)"
    ),
    "str that says another": "class S(str):\n    def __str__(self): return 42\ndef f(x): return S('1')",
    "too many digits": "def f(x): return [10 ** 5000]",
    "stop iteration": "def f(x): raise StopIteration",
    "list equal to all": "class L(list):\n    def __eq__(self, other): return True\ndef f(x): return L()",
    "str equal to all": (
        "class S(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\ndef f(x): return S('a')"
    ),
    "reduce": "class R:\n    def __reduce__(self): return (print, (1,))\ndef f(x): return R()",
    "repr": "class R:\n    def __repr__(self): raise SystemExit\ndef f(x): return R()",
    "not a number": "def f(x): return float('nan')",
    "huge": "def f(x): return 'x' * (100 << 20)",
    "huge int": "def f(x): return 1 << (1 << 24)",
    "deep": "def f(x):\n    v = []\n    for _ in range(100000): v = [v]\n    return v",
    "cyclic": "def f(x):\n    v = []; v.append(v); return v",
    "colliding keys": "def f(x): return {i * ((1 << 61) - 1) for i in range(100)}",
    "forged frames": (
        "import os\n"
        "os.write(3, b'\\x03\\0\\0\\0V42' * 0 + b'\\x05\\0\\0\\0P')\n"
        "os.write(3, b'\\xff' * 100)\n"
        "def f(x): return 0"
    ),
    "forged verdict": "import os\ntry: os.write(4, b'\\x01\\0\\0\\0P')\nexcept OSError: pass\ndef f(x): return 0",
    "exit in call": "import os\ndef f(x): os._exit(0)",
    "exit on load": "import os\nos._exit(0)",
    "raise exit": "def f(x): raise SystemExit(0)",
    "assertion": "def f(x): raise AssertionError",
    "kill judge": "import os, signal\ndef f(x):\n    os.kill(-1, 9)\n    return 0",
    "spin": "def f(x):\n    while True: pass",
    "sleep": "import time\ndef f(x): time.sleep(1000)",
    "swallow the alarm": (
        "def f(x):\n    while True:\n        try:\n            while True: pass\n        except BaseException: pass"
    ),
    "generator": "def f(x): yield 42",
    "bool for int": "def f(x): return True",
    "trace on load": (
        "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: sys.exit(0))\ndef f(x): return 0"
    ),
    "no such name": "def g(x): return 42",
    "patched codec": "def f(x): return 0",
    "exception class": "class V(ValueError):\n    def __init__(self, *a): raise SystemExit\ndef f(x): raise V",
    "silent channel": "import os\nos.close(3)\ndef f(x): return 42",
}
"""Programs whose f(41) is not 42, whatever they try."""
