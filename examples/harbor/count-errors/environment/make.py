"""Makes the log files: the same ones each time."""

from pathlib import Path

LEVELS = ("INFO", "WARNING", "ERROR", "DEBUG", "no error here")
folder = Path("/app/logs")
folder.mkdir(parents=True)
for number in range(12):
    lines = [f"{minute:02}:00 {LEVELS[(minute * minute + number) % 5]} step {minute}" for minute in range(number * 4)]
    (folder / f"part-{number:02}.log").write_text("".join(f"{line}\n" for line in lines))
