#!/bin/bash
# Parts: is it fixed, is the limit kept, and is it committed on top of the old history?
cd /app/repo || exit 1
says() { python3 -c "from slugs import slug; print(($1))" 2>/dev/null; }
fixed=0 limit=0 committed=0
[ "$(says 'slug("Hello,  World!"), slug("  a  b "), slug("--")')" = "('hello-world', 'a-b', '')" ] && fixed=1
[ "$(says 'slug("Hello,  World!", 6), slug("Hello", limit=3)')" = "('hello', 'hel')" ] && limit=1
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0=/app/repo
old=$(git rev-list --max-parents=0 main)
[ -z "$(git status --porcelain --untracked-files=no)" ] && [ "$(git rev-list --count main)" -ge 9 ] \
  && [ "$(git log -1 --format=%s "$old")" = "Make slugs of titles" ] && [ "$(git branch --show-current)" = main ] && committed=1
reward=$((fixed * limit * committed))
echo "{\"reward\": $reward, \"fixed\": $fixed, \"limit\": $limit, \"committed\": $committed}" > /logs/verifier/reward.json
