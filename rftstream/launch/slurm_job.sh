# The part of a batch job that is the same for every run. Before it stand: files (of the run), rftstream (the command),
# folder (for logs), and job (the function that calls `keep` for each worker).
set -uo pipefail

attempt=${SLURM_RESTART_COUNT:-0}
logs=$folder/attempt-$attempt
mkdir -p "$logs"
keepers=()
ended=""  # what ended the job before the run: time, failure

say() { printf '%s %s\n' "$(date -Is)" "$*"; }

has_ended() { "${rftstream[@]}" status "${files[@]}" --json 2>/dev/null | grep -q '"state": "finished"'; }

# Waits for processes of this shell to their ends, though signals interrupt `wait`. The last one's exit code stays.
wait_for() {
  local pid code=0
  for pid in "$@"; do
    wait "$pid"
    code=$?
    while kill -0 "$pid" 2>/dev/null; do
      wait "$pid"
      code=$?
    done
  done
  return "$code"
}

# keep NAME SRUN-OPTION... -- WORKER-ARGUMENT...: one worker, started again when it dies of what may pass.
keep() {
  local name=$1 options=() child="" stopping="" pause=1 deaths=0 began code
  shift
  while [ "$1" != -- ]; do
    options+=("$1")
    shift
  done
  shift
  trap 'stopping=yes; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null' TERM
  trap '' USR1
  while :; do
    began=$SECONDS
    srun "${options[@]}" "${rftstream[@]}" worker "${files[@]}" "$@" >>"$logs/$name.log" 2>&1 &
    child=$!
    [ -z "$stopping" ] || kill -TERM "$child" 2>/dev/null
    wait_for "$child"
    code=$?
    child=""
    case $code in
      0 | 5) return 0 ;;
      2 | 4 | 6)
        say "$name: exit $code, which another try cannot mend; see $logs/$name.log"
        break
        ;;
    esac
    [ -z "$stopping" ] || return 0
    if [ $((SECONDS - began)) -lt 60 ]; then deaths=$((deaths + 1)); else deaths=0 pause=1; fi
    if [ "$deaths" -gt 10 ]; then
      say "$name: died more than ten times in a row, last with exit $code; see $logs/$name.log"
      break
    fi
    say "$name: exit $code; it is started again in $pause s"
    sleep "$pause" &
    child=$!
    wait_for "$child"
    child=""
    [ -z "$stopping" ] || return 0
    pause=$((pause < 30 ? pause * 2 : 60))
  done
  kill -USR1 $$
  return "$code"
}

end() {
  [ -n "$ended" ] || ended=$1
  [ ${#keepers[@]} -eq 0 ] || kill -TERM "${keepers[@]}" 2>/dev/null
}
trap 'end time' TERM
trap 'end failure' USR1

if [ "$attempt" -gt 0 ] && has_ended; then
  say "the run has ended"
  exit 0
fi
if ! "${rftstream[@]}" run "${files[@]}" --no-workers >>"$logs/run.log" 2>&1; then
  cat "$logs/run.log"
  exit 2
fi
job
wait_for "${keepers[@]}"

if has_ended; then
  say "the run has ended"
  exit 0
fi
case $ended in
  time)
    say "the time is up; the job is put back into the queue and goes on from where the log says"
    scontrol requeue "$SLURM_JOB_ID"
    ;;
  *)
    say "the run has not ended; mend the cause, then submit the job once more"
    exit 1
    ;;
esac
