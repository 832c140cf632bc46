#!/bin/bash
if [ "$(tr -d '[:space:]' < /app/token.txt)" = 3f-otter-19 ]; then echo 1.0; else echo 0.0; fi > /logs/verifier/reward.txt
