"""The run of all tests: `python -m tests.suite` runs them, and once more what failed; `storeys` says what they cost."""
