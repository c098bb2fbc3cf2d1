# shellcheck shell=bash
# What the scripts beside it share; they source it. A script sets `script` (its name) and `dry_run` (yes, no).
# Every command that goes over a network has a time limit: `limited` and `ask`.
set -euo pipefail
: "${script:?}" "${dry_run:?}"

readonly POLL_SECONDS=30
readonly MOST_PAUSE_SECONDS=960
child=""   # the process that is being waited for
answer=""  # what the last `ask` was told
scratch="" # a folder of our own, removed at the end

fail() {
  echo "$script: error: $*" >&2
  exit 2
}

say() { echo "$script: $*" >&2; }

# The words of a command as a shell would read them back; ~ is left for that shell to expand.
quoted() {
  local word line=""
  for word in "$@"; do
    [[ $word =~ ^[A-Za-z0-9_./:=@%+,~-]+$ ]] || word=${word@Q}
    line+="$word "
  done
  echo "${line% }"
}

run() {
  if [[ $dry_run == yes ]]; then
    quoted "$@"
  else
    "$@"
  fi
}

# Runs a command with a limit in seconds, after which it and what it has started are ended (exit code 124). In the
# background, so that Ctrl-C is not kept waiting.
limited() {
  local words=(timeout --kill-after=10 "$@") code=0
  if [[ $dry_run == yes ]]; then
    quoted "${words[@]}"
    return
  fi
  "${words[@]}" </dev/null &
  child=$!
  wait "$child" || code=$?
  child=""
  if ((code == 124 || code == 137)); then say "no answer within $1 seconds: ${*:2:5}"; fi
  return "$code"
}

# Like `limited`; what the command prints is then in `answer`. No $(...), whose reader would wait for a child that hangs.
ask() {
  answer=""
  if [[ $dry_run == yes ]]; then
    limited "$@"
    return
  fi
  [[ -n $scratch ]] || scratch=$(mktemp -d)
  limited "$@" >"$scratch/answer" || return
  # shellcheck disable=SC2034 # it is for who asked
  answer=$(<"$scratch/answer")
}

pause() {
  sleep "$1" &
  child=$!
  wait "$child" || true
  child=""
}

# Seconds to wait before the attempt of this number, from 1: 0, 30, 60, 120, ...
back_off() {
  local seconds=$((POLL_SECONDS * (1 << ($1 < 8 ? $1 : 8)) / 4))
  (($1 > 1)) || seconds=0
  echo $((seconds < MOST_PAUSE_SECONDS ? seconds : MOST_PAUSE_SECONDS))
}

# The step of the newest checkpoint that logs of a run tell of, or nothing.
newest_checkpoint() {
  { sed -n 's/^The checkpoint of step \([0-9]*\) is saved\.$/\1/p' "$@" 2>/dev/null || true; } | sort -n | tail -n 1
}

# The value of an option, or an error.
value_of() {
  (($# >= 2)) && [[ $2 != --* ]] || fail "$1 needs a value"
  echo "$2"
}

tidy() { [[ -z $scratch ]] || rm -rf "$scratch"; }

interrupted() {
  [[ -z $child ]] || kill "$child" 2>/dev/null || true
  exit "$1"
}

trap tidy EXIT
trap 'interrupted 130' INT
trap 'interrupted 143' TERM
