asked="" worker=""
trap 'asked=yes; [ -z "$worker" ] || kill -TERM "$worker"' TERM INT
rftstream "$@" &
worker=$!
[ -z "$asked" ] || kill -TERM "$worker"
wait "$worker"
code=$?
while kill -0 "$worker" 2>/dev/null; do
  wait "$worker"
  code=$?
done
[ -z "$asked" ] || [ "$code" -ne 0 ] || code=75
exit "$code"
