#!/bin/bash
cd /app/repo || exit 1
sed -i 's/\[^a-z0-9\]"/[^a-z0-9]+"/' slugs.py
python3 check.py && git commit -q -a -m "One dash for each run of other characters, also with a limit"
