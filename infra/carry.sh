# shellcheck shell=bash
# Runs a process of the training as a child and notes its exit code; scripts beside it source it. A run is complete
# when its processes have noted exit code 0. What a scheduler reports about them is no evidence of that.

# Runs a command to its end and passes SIGTERM on to it. Notes its number in NOTE.pid and its exit code in NOTE.code.
#   carry NOTE GUARD WORDS...  GUARD is called in the background with the number of the process
carry() {
  local note=$1 guard=$2 code=0 guarding
  carried="" interrupted=no
  trap 'interrupted=yes; [[ -z $carried ]] || kill -TERM "$carried" 2>/dev/null || true' TERM
  "${@:3}" &
  carried=$!
  [[ $interrupted == no ]] || kill -TERM "$carried"
  { echo "$carried" >"$note.pid"; } 2>/dev/null || true
  "$guard" "$carried" &
  guarding=$!
  disown "$guarding" 2>/dev/null || true # so that bash does not report its end
  wait_out "$carried" || code=$?
  kill -KILL "$guarding" 2>/dev/null || true
  { echo "$code" >"$note.code.new" && mv "$note.code.new" "$note.code"; } 2>/dev/null ||
    echo "carry.sh: exit code $code could not be noted in $note.code" >&2
  return "$code"
}

# Waits for the end of a child, whatever signals come meanwhile, and returns its exit code. Their traps set `interrupted`.
# (bash 5.2 ends the script where a trap that interrupts `wait` executes `return`, so no trap does.)
wait_out() {
  local code
  while true; do
    interrupted=no code=0
    wait "$1" || code=$?
    [[ $interrupted == yes ]] || return "$code"
  done
}

# The step of the newest checkpoint that logs of a run tell of, or 0.
newest_checkpoint() {
  { echo 0 && sed -n 's/^The checkpoint of step \([0-9]*\) is saved\.$/\1/p' "$@" || true; } 2>/dev/null |
    sort -n | tail -n 1
}

# Sets and exports the variables of a file of lines NAME=value.
load_environment() {
  set -a
  # shellcheck source=/dev/null
  . "$1"
  set +a
}

# The exit code that was noted, or nothing: the process runs, or was lost with its host.
noted_code() { cat "$1.code" 2>/dev/null || true; }
