#!/usr/bin/env bash
# On a host of a TPU slice, in the installed working tree; `tpu_vm.sh` calls it.
#   host.sh prepare         installs Python and make, if they are missing
#   host.sh start WORDS...  runs `gregale WORDS...` so that it outlives the connection; refuses a second one
#   host.sh state           one line: running, ended CODE, stopped, lost, idle, or bare (the installation is not complete);
#                           and the newest checkpoint of the log
#   host.sh stop            SIGTERM: the run saves and ends
# Of the words, @address becomes this host's own address.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=infra/carry.sh
. infra/carry.sh

prepare() {
  local attempt
  command -v python3.11 >/dev/null && command -v make >/dev/null && return
  # A fresh machine updates itself, and holds apt's locks meanwhile. `apt-get update` waits for none, whatever its options.
  for ((attempt = 0; attempt < 60; attempt++)); do
    if sudo apt-get update -qq; then break; fi
    sleep 10
  done
  sudo apt-get install -qq -y -o DPkg::Lock::Timeout=600 python3.11 python3.11-venv make
}

start() {
  # The lock is the run's own: it is free when the last process that inherited it has ended, however it ended.
  exec 9>>train.lock
  flock --nonblock 9 || { echo "a training runs already; stop it first" >&2 && exit 1; }
  rm -f train.pid train.code train.stopped
  if [[ -f train.env ]]; then
    set -a
    # shellcheck source=/dev/null
    . ./train.env
    set +a
  fi
  local words=("$@")
  [[ $* != *@address* ]] || words=("${@//@address/$(hostname -I | cut -d' ' -f1)}")
  setsid nohup bash infra/host.sh carry train : .venv/bin/gregale "${words[@]}" >>train.log 2>&1 </dev/null &
}

is_running() { ! flock --nonblock train.lock true; }

state() {
  local found=idle code checkpoint
  code=$(noted_code train)
  if is_running; then
    found=running
  elif [[ ! -f train.installed ]]; then
    found=bare
  elif [[ -f train.stopped && $code != 0 ]]; then
    found=stopped
  elif [[ -n $code ]]; then
    found="ended $code"
  elif [[ -f train.pid ]]; then
    found=lost
  fi
  touch train.log
  checkpoint=$(sed -n 's/^The checkpoint of step \([0-9]*\) is saved\.$/\1/p' train.log | tail -n 1)
  echo "gregale-host $(uname -n) $found, checkpoint ${checkpoint:-none}"
}

stop() {
  touch train.stopped
  if is_running; then
    # It has just been started if there is no number yet.
    for _ in 1 2 3 4 5; do
      [[ ! -s train.pid ]] || break
      sleep 1
    done
    kill -TERM "$(<train.pid)"
  else
    echo "nothing runs on $(uname -n)"
  fi
}

"$@"
