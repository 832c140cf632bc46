"""Writes the data of examples/mixed.toml: problems of which a third is too easy, a third teaches, and a third is too
hard for a tiny model, and demonstrations from which it can solve the first third and guess at the second.

    python -m scripts.mixed_task
"""

from __future__ import annotations

import json
import random
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SIZES = {"mixed.jsonl": 80, "mixed_held_out.jsonl": 40}
"""File -> problems of each third."""
NUM_EASY = 80
"""Demonstrations of the first third; all numbers that are left over are demonstrations of the second."""
DIGITS = "0123456789"


def main() -> None:
    rng = random.Random(0)
    texts = [f"{number:03d}" for number in range(1000)]
    rng.shuffle(texts)
    numbers = iter(texts)  # all different, so that no problem is in two files
    for name, count in SIZES.items():
        rows = []
        for _ in range(count):
            rows.append({"prompt": f"z{next(numbers)}=", "answer": "0", "kind": "easy"})
            text = next(numbers)
            rows.append({"prompt": f"m{text}=", "answer": text[-1], "kind": "medium"})
            answer = "".join(rng.choice(DIGITS) for _ in range(6))
            rows.append({"prompt": f"h{next(numbers)}=", "answer": answer, "kind": "hard"})
        write(name, rows)
    easy = [{"prompt": f"z{next(numbers)}=", "completion": "0"} for _ in range(NUM_EASY)]
    write(
        "mixed_demonstrations.jsonl",
        [*easy, *({"prompt": f"m{text}=", "completion": rng.choice(text)} for text in numbers)],
    )


def write(name: str, rows: list[dict[str, str]]) -> None:
    (EXAMPLES / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
