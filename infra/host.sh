#!/usr/bin/env bash
# On a host, in the installed working tree; the launchers call it over ssh.
#   host.sh prepare         installs Python and make, if they are missing
#   host.sh install EXTRAS  makes .venv, with the packages of these extras
#   host.sh pull IMAGE      fetches an image, in which the training then runs in the place of .venv
#   host.sh start WORDS...  runs `gregale WORDS...` so that it outlives the connection; refuses a second one, and ends what
#                           an earlier one has left
#   host.sh state [RUNS]    one line: running, ended CODE, stopped, lost, idle, bare (the installation is not complete) or
#                           volatile (RUNS is on a disk that goes with the machine); and the log's newest checkpoint
#   host.sh stop [SECONDS]  SIGTERM: the run saves and ends; what is left after the seconds (600) is killed
# Of the words, @address becomes this host's own address.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=infra/carry.sh
. infra/carry.sh
readonly CONTAINER=gregale LIBTPU_LOCK=/tmp/libtpu_lockfile

prepare() {
  local attempt=0
  bash infra/find_python.sh >/dev/null 2>&1 && command -v make >/dev/null && return
  # A fresh machine updates itself, and holds apt's locks meanwhile. `apt-get update` waits for none, whatever its options.
  until sudo apt-get update -qq || ((++attempt == 60)); do sleep 10; done
  sudo apt-get install -qq -y -o DPkg::Lock::Timeout=600 python3.11 python3.11-venv make ||
    sudo apt-get install -qq -y -o DPkg::Lock::Timeout=600 python3 python3-venv make
}

install() {
  rm -f train.image
  prepare
  make setup
  .venv/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[$1]"
}

pull() {
  # Who is new in the group of docker's users is in it from the next login on, as the start will be.
  docker pull --quiet "$1" || { sudo usermod --append --groups docker "$(id -un)" && sg docker -c "docker pull --quiet '$1'"; }
  echo "$1" >train.image
}

start() {
  end_leftovers
  # The lock is the run's own: it is free when the last process that inherited it has ended, however it ended.
  exec 9>>train.lock
  flock --nonblock 9 || { echo "a training runs already; stop it first" >&2 && exit 1; }
  rm -f train.pid train.code train.stopped train.session
  local words=("$@") gregale=(.venv/bin/gregale)
  [[ $* != *@address* ]] || words=("${@//@address/$(hostname -I | cut -d' ' -f1)}")
  if [[ -f train.image ]]; then
    gregale=(docker run --rm --name "$CONTAINER" --privileged --network host --ulimit memlock=-1 --shm-size 16g
      --user "$(id -u):$(id -g)" --env "HOME=$HOME" --volume "$HOME:$HOME" --volume /mnt:/mnt --workdir "$PWD")
    [[ ! -f train.env ]] || gregale+=(--env-file train.env)
    gregale+=("$(<train.image)" gregale)
  elif [[ -f train.env ]]; then
    load_environment ./train.env
  fi
  setsid nohup bash infra/host.sh carry train : "${gregale[@]}" "${words[@]}" >>train.log 2>&1 </dev/null &
  echo "$!" >train.session
}

# The lock is held by the process that notes the exit code, which leads a session. If only others hold it, that was lost.
is_running() {
  ! flock --nonblock train.lock true && { [[ ! -s train.session ]] || kill -0 "$(<train.session)" 2>/dev/null; }
}

# Ends what an earlier training has left, and takes libtpu's lock away, which outlives a process that was killed.
end_leftovers() {
  local number folder left=()
  touch train.lock
  if is_running; then return; fi
  [[ ! -f train.image ]] || docker rm --force "$CONTAINER" >/dev/null 2>&1 || true
  for number in $(holders "$PWD/train.lock" '/dev/accel*' '/dev/vfio/*'); do
    folder=$(readlink "/proc/$number/cwd") || continue # it has ended
    if [[ $folder != "$PWD"* ]]; then
      echo "process $number ($(tr '\0' ' ' <"/proc/$number/cmdline")) of somebody else holds the TPU; end it" >&2
      exit 1
    fi
    left+=("$number")
  done
  if ((${#left[@]} > 0)); then
    echo "an earlier training has left ${left[*]}: ended"
    kill -TERM "${left[@]}" 2>/dev/null || true
    end_within 30 "${left[@]}" || kill -KILL "${left[@]}" 2>/dev/null || true
  fi
  rm -f "$LIBTPU_LOCK" 2>/dev/null || sudo rm -f "$LIBTPU_LOCK"
}

# The numbers of processes that have one of these files open.
holders() {
  local names=(-false) name
  for name in "$@"; do names+=(-o -lname "$name"); done
  { find /proc/[0-9]*/fd "${names[@]}" 2>/dev/null || true; } | cut -d/ -f3 | sort -un
}

# Whether processes end within so many seconds: end_within SECONDS NUMBERS...
end_within() {
  local count
  for ((count = 0; count < $1; count++)); do
    kill -0 "${@:2}" 2>/dev/null || return 0
    sleep 1
  done
  return 1
}

# Whether what is below a path goes with this machine: it is on the disk of /, or in memory.
is_volatile() {
  local path=$1
  until [[ -e $path ]]; do path=$(dirname "$path"); done
  [[ $(stat --format %d "$path") == $(stat --format %d /) || $(stat --file-system --format %T "$path") =~ ^(tmpfs|ramfs|overlayfs)$ ]]
}

state() {
  local found=idle code
  code=$(noted_code train)
  # The last one that holds counts.
  [[ -f train.pid ]] && found=lost
  [[ -n $code ]] && found="ended $code"
  [[ -f train.stopped && $code != 0 ]] && found=stopped
  [[ -f train.installed ]] || found=bare
  is_running && found=running
  [[ -f train.installed && -n ${1:-} ]] && is_volatile "$1" && found=volatile
  echo "gregale-host $(uname -n) $found, checkpoint $(newest_checkpoint train.log)"
}

stop() {
  local seconds=${1:-600}
  touch train.stopped
  if is_running; then
    kill -TERM "$(<train.session)" # which passes it on
    setsid nohup bash infra/host.sh kill_after "$seconds" "$(<train.session)" >>train.log 2>&1 </dev/null &
    echo "$(uname -n) was asked to save and end; it is killed after $seconds seconds"
  else
    echo "nothing runs on $(uname -n)"
  fi
}

kill_after() {
  if end_within "$1" "$2"; then return; fi
  echo "host.sh: the training has not ended $1 seconds after SIGTERM: killed"
  pkill -KILL --session "$2" || true
  [[ ! -f train.image ]] || docker rm --force "$CONTAINER"
}

"$@"
