#!/usr/bin/env bash
# Trains on Cloud TPU: creates one slice or several, installs this working tree on every host, starts `gregale train`
# there and follows the log. `--help` tells how. Needs gcloud, logged in, and git.
set -euo pipefail

readonly FOLDER=gregale # on the hosts, below the home directory
readonly POLL_SECONDS=30

usage() {
  cat <<'TEXT'
usage: infra/tpu_vm.sh COMMAND --name NAME --zone ZONE [OPTIONS] [-- --dotted.key value ...]

commands:
  up       create, install, train and log, one after the other
  create   ask for the slices and wait until they are there
  install  copy this working tree to every host and install it there
  train    start `gregale train` on every host; it outlives the connection
  log      follow the log of the first host; Ctrl-C ends the following, not the training
  stop     ask the training to save a checkpoint and stop
  delete   give the slices back, with everything on their disks

options:
  --name NAME         of the queued resource, and of its slices
  --zone ZONE         where, for example us-west4-a
  --project PROJECT   default: gcloud's own
  --slices N          number of slices, default 1; mesh.replica has to be a multiple of it
  --accelerator TYPE  of each slice, for example v5litepod-64 (up, create)
  --runtime VERSION   software of the hosts, default v2-alpha-tpuv5-lite (up, create)
  --spot              take capacity that may be reclaimed (up, create)
  --config FILE       the YAML file, below the repository (up, train)
  --dry-run           print every command and run none
  -- ...              keys to override, passed on to `gregale train`

With more than one host, all of them have to see the same run directory and token stores: mount a shared file system
and add, for example, `-- --runs ~/shared/runs --data.cache ~/shared/cache`. Running `train` again resumes.
TEXT
}

fail() {
  echo "tpu_vm.sh: error: $*" >&2
  exit 2
}

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

# gcloud compute tpus queued-resources VERB ... for our project and zone
queued_resources() {
  local verb=$1
  shift
  run gcloud compute tpus queued-resources "$verb" "$@" "${place[@]}"
}

# Runs a command on hosts; first the choice of hosts (all, first).
on_hosts() {
  local which=all
  [[ $1 == all ]] || which=0
  queued_resources ssh "$name" "--node=$which" "--worker=$which" --command "$2"
}

create() {
  [[ -n $accelerator ]] || fail "--accelerator is missing: the type of a slice, for example v5litepod-64"
  local nodes=("--node-id=$name")
  ((slices == 1)) || nodes=("--node-count=$slices" "--node-prefix=$name")
  queued_resources create "$name" "${nodes[@]}" "--accelerator-type=$accelerator" "--runtime-version=$runtime" \
    "${spot[@]}"
  await
}

await() {
  local state
  while true; do
    state=$(queued_resources describe "$name" "--format=value(state.state)")
    case $state in
      ACTIVE) return ;;
      FAILED | SUSPENDING | SUSPENDED) fail "the queued resource $name is $state; \`delete\` it and create it again" ;;
    esac
    if [[ $dry_run == yes ]]; then
      echo "$state"
      return
    fi
    echo "$name is ${state:-unknown}; asking again in $POLL_SECONDS seconds" >&2
    sleep "$POLL_SECONDS"
  done
}

install() {
  local archive="${TMPDIR:-/tmp}/gregale-$name.tar.gz"
  # What git knows of the working tree and what it does not ignore, changes included.
  run bash -o pipefail -c "git -C $(quoted "$root") ls-files --cached --others --exclude-standard -z | \
tar -C $(quoted "$root") -czf $(quoted "$archive") --null --ignore-failed-read --files-from=-"
  queued_resources scp "$archive" "$name:gregale.tar.gz" --node=all --worker=all
  run rm "$archive"
  local python="command -v python3.11 >/dev/null || { sudo apt-get update -qq && sudo apt-get install -qq -y \
python3.11 python3.11-venv make; }"
  local unpack="mkdir -p $FOLDER && tar -xzf gregale.tar.gz -C $FOLDER && cd $FOLDER"
  local setup="make setup && .venv/bin/python -m pip install --quiet --constraint constraints.txt --editable \
'.[tpu,formats]'"
  on_hosts all "$python && $unpack && $setup"
}

train() {
  check_config
  # `auto`: the hosts of all slices find one another by the TPU's metadata.
  local words=(.venv/bin/gregale train "$config" --distributed.coordinator auto "${overrides[@]}")
  local busy="if kill -0 \$(cat train.pid) 2>/dev/null; then echo 'a training runs already; stop it first' >&2; exit 1; fi"
  on_hosts all "cd $FOLDER || exit 1; touch train.pid; $busy; \
setsid nohup $(quoted "${words[@]}") >>train.log 2>&1 </dev/null & echo \$! >train.pid"
}

check_config() {
  [[ -n $config ]] || fail "--config is missing: the YAML file to train, for example config/llama_8b_two_slices.yaml"
  [[ -f $root/$config ]] || fail "--config is $config: there is no such file in $root"
}

follow_log() { on_hosts first "tail -n +1 -F $FOLDER/train.log"; }

stop() { on_hosts all "kill -TERM \$(cat $FOLDER/train.pid)"; }

delete() { queued_resources delete "$name" --force --quiet; }

up() {
  check_config
  create
  install
  train
  follow_log
}

# The value of an option, or an error.
value_of() {
  (($# >= 2)) && [[ $2 != --* ]] || fail "$1 needs a value"
  echo "$2"
}

main() {
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  name="" zone="" project="" slices=1 accelerator="" runtime=v2-alpha-tpuv5-lite config="" dry_run=no
  spot=() overrides=()
  local command=${1:-} value
  case $command in
    up | create | install | train | stop | delete) ;;
    log) command=follow_log ;;
    -h | --help | help) usage && return ;;
    "") usage >&2 && exit 2 ;;
    *) fail "there is no command '$command'; commands: up, create, install, train, log, stop, delete" ;;
  esac
  shift
  while (($#)); do
    case $1 in
      --name | --zone | --project | --slices | --accelerator | --runtime | --config)
        value=$(value_of "$@")
        printf -v "${1#--}" %s "$value"
        shift 2
        ;;
      --spot) spot=(--spot) && shift ;;
      --dry-run) dry_run=yes && shift ;;
      -h | --help) usage && return ;;
      --) shift && overrides=("$@") && break ;;
      *) fail "'$1' is no option; --help lists them (keys of the configuration come after --)" ;;
    esac
  done
  [[ $name =~ ^[a-z]([a-z0-9-]*[a-z0-9])?$ ]] || fail "--name is '$name': give small letters, digits and hyphens"
  [[ -n $zone ]] || fail "--zone is missing: where the TPUs are, for example us-west4-a"
  [[ $slices =~ ^[1-9][0-9]*$ ]] || fail "--slices is '$slices': give a number of slices, 1 or more"
  place=("--zone=$zone")
  [[ -z $project ]] || place+=("--project=$project")
  [[ $dry_run == yes ]] || command -v gcloud >/dev/null || fail "gcloud is not installed; --dry-run works without it"
  "$command"
}

main "$@"
