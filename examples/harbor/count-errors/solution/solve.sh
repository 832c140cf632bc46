#!/bin/bash
cd /app/logs || exit 1
grep -c ERROR -- *.log | grep -v ':0$' | tr ':' ' ' | sort -k2,2nr -k1,1 > /app/errors.txt
