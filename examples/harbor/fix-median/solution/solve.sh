#!/bin/bash
cat > /app/median.py <<'PYTHON'
def median(values):
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
PYTHON
