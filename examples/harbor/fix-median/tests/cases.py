"""Runs each case in a process of its own, and writes the share that pass."""

import json
import subprocess

CASES = (
    "assert median([3, 1, 2]) == 2",
    "assert median([4, 1, 3, 2]) == 2.5",
    "assert median([7]) == 7",
    "values = [3, 1, 2]; median(values); assert values == [3, 1, 2]",
    "assert median([-5, 10]) == 2.5",
    "try: median([])\nexcept ValueError: pass\nelse: raise AssertionError",
)


def passes(case):
    program = f"import sys; sys.path.insert(0, '/app')\nfrom median import median\n{case}\nprint('passed')"
    done = subprocess.run(["python3", "-c", program], capture_output=True, text=True, timeout=20)
    return done.returncode == 0 and done.stdout.endswith("passed\n")


num_passed = sum(map(passes, CASES))
with open("/logs/verifier/reward.json", "w") as file:
    json.dump({"reward": num_passed / len(CASES), "cases": num_passed}, file)
