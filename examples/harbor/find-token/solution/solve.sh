#!/bin/bash
find /data -type f | while read -r file; do { gzip -cdq "$file" 2>/dev/null || cat "$file"; } | sed -n 's/^token=//p'; done > /app/token.txt
