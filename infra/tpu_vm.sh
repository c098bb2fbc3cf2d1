#!/usr/bin/env bash
# Trains on Cloud TPU: creates one slice or several, installs this working tree on every host, starts `gregale train`
# there, follows the log, and on request brings back what was reclaimed until the run is complete. `--help` tells how.
# Needs gcloud, logged in, git, and GNU coreutils.
script=tpu_vm.sh
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
dry_run=no
# shellcheck source=infra/common.sh
. "$root/infra/common.sh"

readonly FOLDER=gregale # on the hosts, below the home directory
readonly MOST_SILENCE=5 # questions in a row that slices or hosts leave without an answer
# Limits of commands, in seconds.
readonly QUESTION=120 REQUEST=600 SETUP=1800

usage() {
  cat <<'TEXT'
usage: infra/tpu_vm.sh COMMAND --name NAME --zone ZONE [OPTIONS] [-- --dotted.key value ...]

commands:
  up       create, install, train and log, one after the other
  watch    do all of this and stay: create, install and train again whatever is preempted or fails, until the run is done
  create   ask for the slices and wait until they are there
  install  copy this working tree to every host and install it there
  train    start `gregale train` on every host; it outlives the connection
  status   tell the state of the slices, and of the training on each host
  log      follow the log of the first host; Ctrl-C ends the following, not the training
  ssh      log in to a host, or run the command that follows -- there
  stop     ask the training to save a checkpoint and stop; a watch then ends too
  delete   give the slices back, with everything on their disks

options:
  --name NAME         of the queued resource, and of its slices
  --zone ZONE         where, for example us-west4-a
  --project PROJECT   default: gcloud's own
  --slices N          number of slices, default 1; mesh.replica has to be a multiple of it
  --accelerator TYPE  of each slice, for example v5litepod-64 (up, watch, create)
  --runtime VERSION   software of the hosts; default: that of the type (up, watch, create)
  --spot              take capacity that may be reclaimed (up, watch, create)
  --reserved          take the project's reserved capacity (up, watch, create)
  --reservation-project PROJECT  take the capacity that this project has reserved (up, watch, create)
  --create-flag FLAG  one word for gcloud's create, such as --internal-ips or --network=ours; may be repeated (up, watch, create)
  --ssh-flag FLAG     one word for gcloud's ssh and scp, such as --tunnel-through-iap; may be repeated
  --config FILE       the YAML file, below the repository (up, watch, train)
  --program PROGRAM   train (the default), or island: the slices are one island of a fleet (up, watch, train)
  --environment FILE  lines NAME=value for the training, such as keys of trackers: copied, never on a command line
  --setup COMMAND     run on every host once it is installed, such as a mount of the shared file system (up, watch, install)
  --attempts N        watch: give up after N in a row without a new checkpoint, default 10
  --then-delete       watch: give the slices back when the run is complete
  --node N            ssh: the slice, default 0; or all, for a command
  --worker N          ssh: the host of the slice, default 0; or all, for a command
  --dry-run           print every command and run none
  -- ...              keys to override, passed on to `gregale`; @address becomes each host's own address

With more than one host, all of them have to see the same run directory and token stores: mount a shared file system
and add, for example, `-- --runs ~/shared/runs --data.cache ~/shared/cache`. Running `train` again resumes. A slice that
is created again has an empty disk: what is to outlive it belongs on that file system too.
TEXT
}

# gcloud compute tpus queued-resources VERB ... for our project and zone, by a runner (run, limited N, ask N)
queued_resources() {
  local runner=()
  while [[ $1 != : ]]; do runner+=("$1") && shift; done
  "${runner[@]}" gcloud compute tpus queued-resources "${@:2}" "${place[@]}"
}

# Runs a command on hosts by a runner; first the choice of hosts (all, first).
on_hosts() {
  local which=all
  [[ $1 == all ]] || which=0
  queued_resources "${@:3}" : ssh "$name" "--node=$which" "--worker=$which" "${ssh_flags[@]}" --command "$2"
}

# Copies a file to all hosts.
to_hosts() {
  queued_resources limited "$REQUEST" : scp "$1" "$name:$2" --node=all --worker=all "${ssh_flags[@]}"
}

check_create() {
  [[ -n $accelerator ]] || fail "--accelerator is missing: the type of a slice, for example v5litepod-64"
  ((${#capacity[@]} < 2)) || fail "--spot, --reserved and --reservation-project exclude one another: give one"
  [[ -n $runtime ]] || runtime=$(runtime_of "$accelerator")
}

# The software that a type of TPU needs.
runtime_of() {
  case $1 in
    v2-* | v3-* | v4-*) echo tpu-ubuntu2204-base ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
    *) fail "--runtime is missing: the software for --accelerator $1 is not known here" ;;
  esac
}

request() {
  local nodes=("--node-id=$name")
  ((slices == 1)) || nodes=("--node-count=$slices" "--node-prefix=$name")
  queued_resources limited "$REQUEST" : create "$name" "${nodes[@]}" "--accelerator-type=$accelerator" \
    "--runtime-version=$runtime" "${capacity[@]}" "${create_flags[@]}"
}

create() {
  check_create
  request && await
}

# Sets `slices_state`: that of the queued resource, or nothing if there is none. Fails if that is not known.
ask_slices() {
  local found state
  slices_state=""
  queued_resources ask "$QUESTION" : list "--format=value(name.basename(),state.state)" || return
  while read -r found state; do
    [[ $found != "$name" ]] || slices_state=${state:-UNKNOWN}
  done <<<"$answer"
}

# Waits until the slices are there; fails if they will not be.
await() {
  local silence=0
  while true; do
    if ask_slices; then silence=0; else
      ((++silence < MOST_SILENCE)) || { say "error: gcloud does not tell how $name is" && return 1; }
      slices_state=unknown
    fi
    [[ $dry_run == no ]] || return 0
    case $slices_state in
      ACTIVE) return ;;
      "" | FAILED | SUSPENDING | SUSPENDED)
        say "error: the queued resource $name is ${slices_state:-gone}; \`delete\` it and create it again"
        return 1
        ;;
    esac
    say "$name is $slices_state; asking again in $POLL_SECONDS seconds"
    pause "$POLL_SECONDS"
  done
}

install() {
  local archive="${TMPDIR:-/tmp}/gregale-$name.tar.gz" code=0
  # What git knows of the working tree and what it does not ignore, changes included; maybe a file of keys.
  limited "$QUESTION" bash -o pipefail -c "umask 077 && rm -f $(quoted "$archive") && git -C $(quoted "$root") ls-files --cached --others --exclude-standard -z | \
tar -C $(quoted "$root") -czf $(quoted "$archive") --null --ignore-failed-read --files-from=-" || return
  to_hosts "$archive" gregale.tar.gz || code=$?
  run rm "$archive"
  ((code == 0)) || return "$code"
  local unpack="mkdir -p $FOLDER && tar -xzf gregale.tar.gz -C $FOLDER && cd $FOLDER && rm -f train.installed"
  local packages="bash infra/host.sh prepare && make setup && .venv/bin/python -m pip install --quiet --constraint constraints.txt --editable \
'.[$extras]' && touch train.installed"
  on_hosts all "$unpack && $packages" limited "$SETUP" || return
  [[ -z $environment ]] || copy_environment || return
  [[ -z $setup ]] || on_hosts all "$setup" limited "$SETUP"
}

copy_environment() {
  to_hosts "$environment" gregale.env || return
  on_hosts all "chmod 600 gregale.env && mv gregale.env $FOLDER/train.env" limited "$QUESTION"
}

train() {
  check_config
  # `auto`: the hosts of all slices find one another by the TPU's metadata.
  local words=("$program" "$config" --distributed.coordinator auto "${overrides[@]}")
  on_hosts all "bash $FOLDER/infra/host.sh start $(quoted "${words[@]}")" limited "$QUESTION"
}

check_config() {
  [[ -n $config ]] || fail "--config is missing: the YAML file to train, for example config/llama_8b_two_slices.yaml"
  [[ -f $root/$config ]] || fail "--config is $config: there is no such file in $root"
}

# A line of each host in `answer`; a host says `bare` until its installation is complete.
ask_hosts() {
  on_hosts all "if [ -f $FOLDER/infra/host.sh ]; then bash $FOLDER/infra/host.sh state; \
else echo \"gregale-host \$(uname -n) bare, checkpoint none\"; fi" ask "$QUESTION"
}

status() {
  queued_resources limited "$QUESTION" : describe "$name" "--format=yaml(name,state,tpu)" || return
  ask_slices || return
  if [[ $slices_state == ACTIVE || $dry_run == yes ]]; then
    ask_hosts || return
    [[ -z $answer ]] || echo "$answer"
    on_hosts first "tail -n 3 $FOLDER/train.log" limited "$QUESTION"
  fi
}

# Without a limit: they last as long as somebody looks.
follow_log() { on_hosts first "tail -n +1 -F $FOLDER/train.log" run; }

ssh() {
  local words=()
  ((${#overrides[@]} == 0)) || words=(--command "$(quoted "${overrides[@]}")")
  queued_resources run : ssh "$name" "--node=$node" "--worker=$worker" "${ssh_flags[@]}" "${words[@]}"
}

stop() { on_hosts all "bash $FOLDER/infra/host.sh stop" limited "$QUESTION"; }

delete() { queued_resources limited "$SETUP" : delete "$name" --force --quiet; }

up() {
  check_config
  check_create
  create && install && train && follow_log
}

# --- watch: one turn after the other looks at what is there, and does the next thing that is missing

watch() {
  check_config
  check_create
  if [[ $dry_run == yes ]]; then
    ask_slices && delete && create && install && train && ask_hosts
    [[ $then_delete == no ]] || delete
    return
  fi
  exec 9>>"${TMPDIR:-/tmp}/gregale-watch-$name.$zone.lock"
  flock --nonblock 9 || fail "another watch of $name runs on this machine"
  attempt=0 silence=0 fresh=no checkpoint=0 checkpoint_before=0 last_said=""
  while true; do
    if ask_slices; then
      case $slices_state in
        ACTIVE) if look_after_hosts; then break; fi ;;
        "") bring ;;
        FAILED | SUSPENDED) give_back "$name is $slices_state" ;;
        *) tell "$name is $slices_state" && pause "$POLL_SECONDS" ;;
      esac
    else
      pause "$POLL_SECONDS" # gcloud itself, or the way to it: nothing is known, so nothing is changed
    fi
  done
  say "$name is complete, with the checkpoint of step $checkpoint"
  if [[ $then_delete == yes ]]; then
    delete
  else
    say "its slices are still there, and cost; \`delete\` gives them back"
  fi
}

# A line where something has changed.
tell() {
  [[ $1 == "$last_said" ]] || say "$(date +%H:%M:%S) $1"
  last_said=$1
}

bring() {
  begin_attempt
  tell "creating $name"
  if create; then fresh=yes; fi
}

# Belongs to the attempt that `bring` begins, if it succeeds.
give_back() {
  tell "$1; giving it back to create it again"
  delete || begin_attempt
}

# Counts attempts without a new checkpoint in between, waits longer before each, and in the end gives up.
begin_attempt() {
  if ((checkpoint > checkpoint_before)); then
    attempt=0
    checkpoint_before=$checkpoint
  fi
  attempt=$((attempt + 1))
  if ((attempt > attempts)); then
    say "error: gave up after $attempts attempts in a row without a new checkpoint; \`status\` and \`log\` tell more." \
      "The slices may still be there, and cost."
    exit 1
  fi
  local seconds
  seconds=$(back_off "$attempt")
  if ((seconds > 0)); then
    tell "attempt $attempt of $attempts without a new checkpoint, in $seconds seconds"
    pause "$seconds"
  fi
}

# Does what the hosts need; succeeds when the run is complete.
look_after_hosts() {
  local states
  if ! ask_hosts; then
    if ((++silence >= MOST_SILENCE)); then
      silence=0
      give_back "the hosts of $name have not answered $MOST_SILENCE times in a row"
    else
      pause "$POLL_SECONDS"
    fi
    return 1
  fi
  silence=0
  read_states
  case " $states " in
    *" running "*)
      tell "$name trains, checkpoint $checkpoint" && pause "$POLL_SECONDS"
      return 1
      ;;
    *" bare "*)
      start_again "installing on $name" install
      return 1
      ;;
    *" stopped "*)
      say "$name was stopped on request after checkpoint $checkpoint; \`train\` or \`watch\` after \`train\` goes on"
      exit 143
      ;;
    *" 2 "*)
      say "error: the run ended with a mistake that starting it again does not mend; \`log\` shows it. The slices are" \
        "still there, and cost."
      exit 2
      ;;
  esac
  [[ $states != 0 ]] || return 0
  if [[ $states == idle ]]; then
    start_again "starting the training on $name" train
  else
    start_again "the training on $name ended ($states); starting it" train
  fi
  return 1
}

start_again() {
  [[ $fresh == yes ]] || begin_attempt
  fresh=no
  tell "$1"
  if "$2"; then
    # A start that follows an installation belongs to the same attempt.
    if [[ $2 == install ]]; then fresh=yes; fi
  else
    say "that failed"
  fi
}

# Sets `states` to those of the hosts in `answer`: running, bare, stopped, lost, idle, exit codes. Notes `checkpoint`.
read_states() {
  local line pattern='gregale-host [^ ]+ (ended )?([a-z0-9]+), checkpoint ([a-z0-9]+)'
  states=""
  while read -r line; do
    [[ $line =~ $pattern ]] || continue
    [[ " $states " == *" ${BASH_REMATCH[2]} "* ]] || states+="${states:+ }${BASH_REMATCH[2]}"
    [[ ${BASH_REMATCH[3]} == none ]] || checkpoint=${BASH_REMATCH[3]}
  done <<<"$answer"
}

main() {
  name="" zone="" project="" slices=1 accelerator="" runtime="" config="" program=train environment="" setup=""
  attempts=10 node=0 worker=0 then_delete=no
  capacity=() create_flags=() ssh_flags=() overrides=()
  local command=${1:-} value variable
  case $command in
    up | watch | create | install | train | status | ssh | stop | delete) ;;
    log) command=follow_log ;;
    -h | --help | help) usage && return ;;
    "") usage >&2 && exit 2 ;;
    *)
      fail "there is no command '$command'; commands: up, watch, create, install, train, status, log, ssh, stop, delete"
      ;;
  esac
  shift
  while (($#)); do
    case $1 in
      --name | --zone | --project | --slices | --accelerator | --runtime | --config | --program | --environment | \
        --setup | --attempts | --node | --worker)
        value=$(value_of "$@")
        variable=${1#--}
        printf -v "$variable" %s "$value"
        shift 2
        ;;
      --reservation-project)
        value=$(value_of "$@")
        capacity+=("--reservation-host-project=$value")
        shift 2
        ;;
      --create-flag | --ssh-flag) # its value may begin with --
        [[ ${2:-} == -* ]] || fail "$1 needs one of gcloud's flags as its value, such as --name=value"
        if [[ $1 == --create-flag ]]; then create_flags+=("$2"); else ssh_flags+=("$2"); fi
        shift 2
        ;;
      --spot | --reserved) capacity+=("$1") && shift ;;
      --then-delete) then_delete=yes && shift ;;
      --dry-run) dry_run=yes && shift ;;
      -h | --help) usage && return ;;
      --) shift && overrides=("$@") && break ;;
      *) fail "'$1' is no option; --help lists them (keys of the configuration come after --)" ;;
    esac
  done
  check_options
  "$command"
}

check_options() {
  [[ $name =~ ^[a-z]([a-z0-9-]*[a-z0-9])?$ ]] || fail "--name is '$name': give small letters, digits and hyphens"
  [[ -n $zone ]] || fail "--zone is missing: where the TPUs are, for example us-west4-a"
  [[ $slices =~ ^[1-9][0-9]*$ ]] || fail "--slices is '$slices': give a number of slices, 1 or more"
  [[ $attempts =~ ^[1-9][0-9]*$ ]] || fail "--attempts is '$attempts': give a number, 1 or more"
  [[ -z $environment || -f $environment ]] || fail "--environment is $environment: there is no such file"
  case $program in
    train) extras=tpu,formats,gcs ;;
    island) extras=tpu,formats,gcs,islands ;;
    *) fail "--program is '$program': give train or island" ;;
  esac
  place=("--zone=$zone")
  [[ -z $project ]] || place+=("--project=$project")
  [[ $dry_run == yes ]] || command -v gcloud >/dev/null || fail "gcloud is not installed; --dry-run works without it"
}

main "$@"
