"""Own modules of the examples, and the generator of the docs, are found as a user's would be: on the path."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "examples"), str(HERE.parent.parent / "examples"), str(HERE.parent.parent / "docs")]
