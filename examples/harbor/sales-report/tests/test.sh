#!/bin/bash
# Compares the report with the sums of the same data, which lie here: the agent may have changed the database.
if cmp -s <(tr -d '\r' < /app/report.csv) /tests/expected.csv; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
