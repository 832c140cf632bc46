# The part of a batch job that is the same for every run. Before it stand: files (of the run), rftstream (the command),
# folder (for logs), and job (the function that calls `keep` for each worker).
set -uo pipefail

# SLURM takes the plain id of an array's task for the whole array.
id=${SLURM_ARRAY_TASK_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
id=${id:-$SLURM_JOB_ID}
attempt=${SLURM_RESTART_COUNT:-0}
logs=$folder/attempt-$attempt
mkdir -p "$logs"
keepers=()
ended=""  # what ended the job before the run: time, cancel, failure
# What the job asked for is not to become options of each step.
unset SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_CPUS_PER_TASK SLURM_GPUS_PER_NODE

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

# leave NAME PID: tells a worker to leave. srun would kill it at once, so its step is told; PID is that of srun, for a
# step that is not there yet, or of a pause.
leave() {
  local step steps
  steps=$(squeue --noheader --jobs="$id" --steps --format='%i %j' 2>/dev/null)
  step=$(awk -v name="$1" '$2 == name { print $1 }' <<<"$steps")
  if [ -n "$step" ]; then
    scancel --signal=TERM "$step" 2>/dev/null
  elif [ -n "$2" ]; then
    kill -TERM "$2" 2>/dev/null
  fi
}

# keep NAME SRUN-OPTION... -- WORKER-ARGUMENT...: one worker, started again when it dies of what may pass, and when it
# left though the run goes on.
keep() {
  local name=$1 options=() child="" stopping="" pause=1 deaths=0 began code
  shift
  while [ "$1" != -- ]; do
    options+=("$1")
    shift
  done
  shift
  trap 'stopping=yes; leave "$name" "$child"' USR2
  trap 'stopping=yes' TERM # SLURM tells the steps, too: a second TERM would end a worker at once
  trap '' USR1
  while :; do
    began=$SECONDS
    srun "${options[@]}" "${rftstream[@]}" worker "${files[@]}" --process "$name" --metrics-port 0 "$@" \
      >>"$logs/$name.log" 2>&1 &
    child=$!
    [ -z "$stopping" ] || leave "$name" "$child"
    wait_for "$child"
    code=$?
    child=""
    case $code in
      5) return 0 ;;
      2 | 4 | 6 | 7)
        say "$name: exit $code, which another try cannot mend; see $logs/$name.log"
        break
        ;;
    esac
    kill -0 $$ 2>/dev/null || return 1 # the job's script was killed, and SLURM does not find what it left
    if [ -n "$stopping" ] || has_ended; then return 0; fi
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
    kill -0 $$ 2>/dev/null || return 1
    [ -z "$stopping" ] || return 0
    pause=$((pause < 30 ? pause * 2 : 60))
  done
  kill -USR1 $$
  return "$code"
}

# end WHY SIGNAL: the job ends, and its keepers with it.
end() {
  [ -n "$ended" ] || ended=$1
  [ ${#keepers[@]} -eq 0 ] || kill "-$2" "${keepers[@]}" 2>/dev/null
}
trap 'end time USR2' USR2 # sbatch --signal: the time is nearly up
trap 'end failure USR2' USR1
trap 'end cancel TERM' TERM # scancel, or the nodes are taken for others: SLURM puts the job back into the queue, or not

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
    scontrol requeue "$id"
    ;;
  cancel)
    say "the job was cancelled; the run goes on when the job is submitted once more"
    exit 1
    ;;
  *)
    say "the run has not ended; mend the cause, then submit the job once more"
    exit 1
    ;;
esac
