#!/usr/bin/env bash
# usage: infra/slurm.sh COMMAND --name NAME [OPTIONS] [-- --dotted.key value ...]
# Trains on GPU boxes under Slurm: writes an sbatch script and submits it. Each job submits its successor before it
# begins, so that the run goes on after a time limit, a preemption or a dead node, until it is complete. Needs the
# commands of Slurm, and a file system that all nodes share, with this working tree and its .venv on it.
#
# commands:
#   submit  write the script slurm/NAME/job.sh and submit it; refused while a job of this name is queued or runs
#   status  show the jobs of this name, the newest checkpoint and the last lines of the log
#   log     follow the newest log; Ctrl-C ends the following, not the training
#   stop    ask the running job to save a checkpoint and end, and drop its successor; `submit` goes on
#
# options:
#   --name NAME         of the jobs; their scripts, logs and notes are in slurm/NAME
#   --config FILE       the YAML file, below the repository (submit)
#   --nodes N           boxes, default 1 (submit)
#   --gpus N            GPUs of a box, default 8; each has a process of its own (submit)
#   --cpus N, --mem SIZE  cores of a process, and memory of a box, for example 500G; default: Slurm's (submit)
#   --gres GRES         ask for the GPUs as generic resources, for example gpu:a100:4, where Slurm knows no --gpus (submit)
#   --time TIME         limit of a job, for example 04:00:00 (submit)
#   --margin SECONDS    how long before the limit the checkpoint begins, default 300 (submit)
#   --partition, --account, --qos, --constraint, --reservation VALUE  passed on to sbatch (submit)
#   --exclusive         take whole boxes (submit)
#   --sbatch-flag FLAG  one more word for sbatch, such as --nodelist=n[1-4]; may be repeated (submit)
#   --setup COMMAND     run in each job before the training, such as 'module load cuda/13'; may be repeated (submit)
#   --container IMAGE   train in an image made from infra/Dockerfile: by Apptainer if it ends in .sif, else by Pyxis (submit)
#   --environment FILE  lines NAME=value for the training, such as keys of trackers: read in the job, never on a command line
#   --attempts N        end after N jobs in a row without a new checkpoint, default 5 (submit)
#   --dry-run           print every command and the script, run none
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=infra/carry.sh
. "$root/infra/carry.sh"

readonly QUESTION=60 # limit in seconds of a question to Slurm
readonly POLL_SECONDS=30 MOST_PAUSE_SECONDS=960 MOST_TRIES=5
readonly AGAIN=75          # exit code of a training that the same command may complete
readonly EARLY_SECONDS=300 # after which a job does not start its training again
readonly LOOK_SECONDS=5 SAVING_SECONDS=120 # of a process whose job is over: when it notices, and for the last checkpoint

usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

fail() { say "error: $*" && exit 2; }

say() { echo "slurm.sh: $*" >&2; }

# The words of a command as a shell reads them back.
quoted() { printf '%q ' "$@" && echo; }

# Runs a command of Slurm, which is ended when it takes too long (exit code 124). In the background, so that a signal is
# not kept waiting. What it prints is then in `answer`: a reader of $(...) would wait for a child that hangs.
ask() {
  local words=(timeout --kill-after=10 "$QUESTION" "$@") code=0
  answer=""
  [[ $dry_run == no ]] || { quoted "${words[@]}" && return; }
  [[ -n $scratch ]] || scratch=$(mktemp -d)
  "${words[@]}" </dev/null >"$scratch/answer" &
  child=$!
  wait_out "$child" || code=$? # whatever signals come: a second `sbatch` would submit a second job
  child="" answer=$(<"$scratch/answer")
  if ((code == 124 || code == 137)); then say "no answer within $QUESTION seconds: ${*:1:4}"; fi
  return "$code"
}

pause() {
  sleep "$1" &
  child=$!
  wait "$child" || true
  child=""
}

interrupted() {
  [[ -z $child ]] || kill "$child" 2>/dev/null || true
  exit "$1"
}

# --- on the login node

submit() {
  [[ -n $config ]] || fail "--config is missing: the YAML file to train, for example config/llama_124m_gpu.yaml"
  [[ -f $root/$config ]] || fail "--config is $config: there is no such file in $root"
  [[ $time =~ ^[0-9]+([-:][0-9]+)*$ ]] || fail "--time is '$time': give the limit of a job, for example 04:00:00"
  if [[ $dry_run == no ]]; then
    mkdir -p "$folder"
    exec 9>>"$folder/lock"
    flock --nonblock 9 || fail "another submit of $name is under way"
  fi
  queue PENDING,CONFIGURING,RUNNING,SUSPENDED,COMPLETING ||
    fail "squeue does not answer: whether a job of $name is there is not known, so none was submitted"
  [[ -z $answer ]] || fail "a job of $name is queued or runs: ${answer//$'\n'/, }. \`stop\` ends it"
  if [[ $dry_run == yes ]]; then
    echo "mkdir -p $(quoted "$folder")"
    echo "cat >$(quoted "$folder/job.sh") <<'SCRIPT'"
    job_script
    echo "SCRIPT"
  else
    rm -f "$folder/stopped" "$folder/complete" "$folder/attempts"
    job_script >"$folder/job.sh.new"
    mv "$folder/job.sh.new" "$folder/job.sh"
  fi
  sbatch_script || fail "sbatch failed; \`status\` tells whether the job is there all the same"
  [[ $dry_run == yes ]] || say "job ${answer%%;*} is queued; its log will be slurm/$name/${answer%%;*}.log"
}

# Of this user's jobs with this name and in some states, the numbers.
queue() { ask squeue --noheader "--user=$(id -un)" "--name=$name" "--states=$1" "--format=%i"; }

sbatch_script() { ask sbatch --parsable "--chdir=$root" "$@" "$folder/job.sh"; }

job_script() {
  local words=(bash "$root/infra/slurm.sh" job --name "$name" --nodes "$nodes" --gpus "$gpus" --attempts "$attempts")
  local program=(.venv/bin/gregale) boxes="--gpus-per-node=$gpus" line
  [[ -z $gres ]] || boxes="--gres=$gres"
  [[ -z $environment ]] || words+=(--environment "$environment")
  for line in "${setup[@]}"; do words+=(--setup "$line"); done
  if [[ $container == *.sif ]]; then
    program=(apptainer exec --nv --bind "$root" --pwd "$root" "$container" gregale)
  elif [[ -n $container ]]; then
    program=(gregale)
    words+=(--container "$container")
  fi
  words+=(-- "${program[@]}" train "$config" --distributed.coordinator auto "${overrides[@]}")
  echo "#!/usr/bin/env bash"
  printf '#SBATCH %s\n' "--job-name=$name" "--nodes=$nodes" "--ntasks-per-node=$gpus" "$boxes" \
    "--time=$time" "--signal=B:USR1@$margin" --no-requeue --open-mode=append "--output=slurm/$name/%j.log" \
    "${asked[@]}"
  echo "exec $(quoted "${words[@]}")"
}

status() {
  ask squeue "--user=$(id -un)" "--name=$name" --Format=JobID,State,TimeUsed,TimeLeft,NumNodes,Reason
  [[ $dry_run == no ]] || return 0
  echo "$answer"
  [[ ! -f $folder/complete ]] || echo "The run is complete."
  [[ ! -f $folder/stopped ]] || echo "The run was stopped on request; \`submit\` goes on."
  echo "newest checkpoint: $(newest_checkpoint "$folder"/*.log)"
  newest_log | xargs --no-run-if-empty --delimiter='\n' tail -n 5
}

log() {
  local log
  log=$(newest_log)
  [[ -n $log ]] || fail "there is no log in slurm/$name yet: no job of this name has begun"
  if [[ $dry_run == yes ]]; then quoted tail -n +1 -F "$log"; else tail -n +1 -F "$log"; fi
}

newest_log() {
  { find "$folder" -name '*.log' -printf '%T@ %p\n' || true; } 2>/dev/null | sort -n | sed -n '$s/^[^ ]* //p'
}

stop() {
  if [[ $dry_run == no ]]; then
    mkdir -p "$folder"
    touch "$folder/stopped" # a job that begins now ends at once, and none submits a successor
  fi
  ask scancel "--user=$(id -un)" "--name=$name" --state=PENDING || return
  ask scancel "--user=$(id -un)" "--name=$name" --state=RUNNING --batch --signal=USR1
}

# --- in a job

job() {
  id=${SLURM_JOB_ID:?is set in a job only} heir="" step="" interrupted=no asked_to_save=no told=no
  local code=0
  trap save USR1
  cd "$root"
  [[ ! -f $folder/stopped ]] || { say "the run was stopped on request" && return; }
  [[ ! -f $folder/complete ]] || { say "the run is complete" && return; }
  count_attempts
  submit_heir || say "the successor is not submitted yet; that is tried again"
  trap 'interrupted=yes' TERM # Slurm sends it to the training too
  # From here on this job alone trains. Processes that earlier jobs have left end when they find their folder gone.
  turn=$folder/turns/$id.$(date +%s)
  rm -rf "$folder"/turns/*
  mkdir -p "$turn"
  train "$@" || code=$?
  outcome=$code
  judge
  rm -rf "$turn"
  conclude "$outcome"
  return "$outcome"
}

# Sets `outcome`, which is srun's exit code, to what the processes themselves have noted: srun ends with 0 also when
# slurmd of its node dies.
judge() {
  local task noted complete=0 processes=$((nodes * gpus))
  for ((task = 0; task < processes; task++)); do
    noted=$(noted_code "$turn/$task")
    [[ $noted != 2 ]] || { outcome=2 && return; }
    [[ $noted != 0 ]] || complete=$((complete + 1))
  done
  if ((complete == processes)); then
    outcome=0
  elif ((outcome == 0)); then
    outcome=$AGAIN
    say "srun ended with 0, but $complete of $processes processes have noted that the run is complete; the run goes on"
  fi
}

# Jobs in a row that began with the same newest checkpoint as the one before; ends when there were enough.
count_attempts() {
  local before=-1 attempt=0 step
  step=$(newest_checkpoint "$folder"/*.log)
  [[ ! -f $folder/attempts ]] || read -r before attempt <"$folder/attempts"
  ((step == before)) || attempt=0
  attempt=$((attempt + 1))
  echo "$step $attempt" >"$folder/attempts.new"
  mv "$folder/attempts.new" "$folder/attempts"
  if ((attempt > attempts)); then
    say "error: $attempts jobs in a row have made no new checkpoint (the newest is that of step $step); no more are" \
      "submitted. The logs in slurm/$name tell why; \`submit\` begins to count anew."
    exit 1
  fi
  attempts_so_far=$attempt
}

# Submits the successor, unless Slurm knows of one: a submission whose answer was lost is found, not repeated.
submit_heir() {
  [[ -z $heir ]] || return 0
  [[ ! -f $folder/stopped ]] || return 0
  queue PENDING || return # the job before this one may still be completing
  heir=$(grep -vx "$id" <<<"$answer" | head -n 1) || heir=""
  if [[ -z $heir ]]; then
    sbatch_script "--dependency=afterany:$id" || return
    heir=${answer%%;*}
  fi
  say "job $heir follows this one"
}

drop_heir() {
  [[ -z $heir ]] || ask scancel "$heir" || say "job $heir could not be cancelled; it will end as soon as it begins"
}

train() {
  local code line try
  [[ -z $environment ]] || load_environment "$environment"
  for line in "${setup[@]}"; do
    set +eu # what it calls is not ours, such as the function `module`
    eval "$line"
    code=$?
    set -eu
    ((code == 0)) || { say "error: the setup failed with exit code $code: $line" && return 1; }
  done
  for ((try = 1; ; try++)); do
    [[ $asked_to_save == no ]] || return 143
    code=0
    run_step "$@" || code=$?
    ((code == AGAIN && try < MOST_TRIES && SECONDS < EARLY_SECONDS)) || return "$code"
    say "the training could not begin; processes of an earlier job may still be saving. It is started again soon"
    pause "$POLL_SECONDS"
  done
}

run_step() {
  rm -f "$turn"/*
  local boxed=()
  [[ -z $container ]] || boxed=("--container-image=$container" "--container-mounts=$root" "--container-workdir=$root")
  # Since Slurm 22.05 srun takes the cores of a process from this variable only.
  [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
  # A process that has saved and ended must not end those that still save; the processes watch one another.
  srun --kill-on-bad-exit=0 "${boxed[@]}" bash "$root/infra/slurm.sh" task "$turn" "$@" &
  step=$!
  [[ $asked_to_save == no || $told == yes ]] || tell_to_save # by a signal that came before there was a number
  wait_out "$step"
}

# SIGTERM to all processes of the training. Not to srun, which would kill them.
save() {
  interrupted=yes asked_to_save=yes
  [[ -z $step || $told == yes ]] || tell_to_save
}

tell_to_save() {
  local try
  say "saving before the end of this job"
  for ((try = 1; try <= MOST_TRIES; try++)); do
    timeout --kill-after=10 "$QUESTION" scancel --signal=TERM "$id" </dev/null && told=yes && break
    sleep 5
  done
  [[ $told == yes ]] || say "error: the training could not be told to save; its newest checkpoint has to do"
}

conclude() {
  local try=1 seconds why=""
  case $1 in
    0) touch "$folder/complete" && why="the run is complete" ;;
    2) why="error: the run ended with a mistake that starting it again does not mend; it is told above" ;;
    *) [[ ! -f $folder/stopped ]] || why="stopped on request; \`submit\` goes on" ;;
  esac
  if [[ -n $why ]]; then
    say "$why"
    drop_heir
    return
  fi
  until submit_heir || ((++try > MOST_TRIES)); do pause "$POLL_SECONDS"; done
  [[ -n $heir ]] || { say "error: no successor could be submitted; \`submit\` goes on" && return; }
  if [[ $asked_to_save == no ]]; then
    # It ended by itself, and may do so again.
    seconds=$((POLL_SECONDS << (attempts_so_far < 9 ? attempts_so_far - 1 : 8)))
    ((seconds < MOST_PAUSE_SECONDS)) || seconds=$MOST_PAUSE_SECONDS
    ask scontrol update "JobId=$heir" "StartTime=now+$seconds" ||
      say "job $heir begins without a pause"
  fi
}

# One process of the training, which srun starts: task TURN WORDS... It notes its exit code in the folder TURN, which is
# there as long as its job may train.
task() {
  turn=$1
  carry "$turn/$SLURM_PROCID" guard "${@:2}"
}

# When the folder is gone, the process saves and ends: srun and slurmd of this node may be dead, so that Slurm cannot end it.
guard() {
  trap '' TERM # it is meant for the training
  # Without the folder above, the file system does not answer, and nothing is known.
  while [[ -d $turn || ! -d ${turn%/*} ]]; do seconds "$LOOK_SECONDS"; done
  say "the job $SLURM_JOB_ID is over; its process $SLURM_PROCID saves and ends"
  kill -TERM "$1"
  seconds "$SAVING_SECONDS"
  kill -KILL "$1"
}

# Waits without a child, which would outlive this process.
seconds() { read -rt "$1" <> <(:) || true; }

main() {
  dry_run=no child="" answer="" scratch="" # `child` is waited for; `scratch` is a folder of our own
  trap '[[ -z $scratch ]] || rm -rf "$scratch"' EXIT
  trap 'interrupted 130' INT
  trap 'interrupted 143' TERM
  name="" config="" nodes=1 gpus="" time="" margin=300 environment="" attempts=5 gres="" container=""
  asked=() setup=() overrides=()
  local command=${1:-} option value
  case $command in
    submit | status | log | stop | job) ;;
    -h | --help | help) usage && return ;;
    *) fail "there is no command '$command'; commands: submit, status, log, stop" ;;
  esac
  shift
  while (($#)); do
    option=$1 value=${2:-}
    shift
    case $option in
      --exclusive) asked+=("$option") && continue ;;
      --dry-run) dry_run=yes && continue ;;
      -h | --help) usage && return ;;
      --) overrides=("$@") && break ;;
      --sbatch-flag) [[ $value == -* ]] || fail "$option needs one of sbatch's flags, such as --nodelist=n1" ;;
      *) [[ -n $value && $value != --* ]] || fail "'$option' is no option, or needs a value; --help lists them" ;;
    esac
    shift
    case $option in
      --name | --config | --nodes | --gpus | --time | --margin | --environment | --attempts | --gres | --container)
        printf -v "${option#--}" %s "$value"
        ;;
      --setup) setup+=("$value") ;;
      --sbatch-flag) asked+=("$value") ;;
      --cpus | --mem | --partition | --account | --qos | --constraint | --reservation)
        asked+=("${option/%cpus/cpus-per-task}=$value")
        ;;
      *) fail "'$option' is no option; --help lists them (keys of the configuration come after --)" ;;
    esac
  done
  check_options
  if [[ $command == job ]]; then job "${overrides[@]}"; else "$command"; fi
}

check_options() {
  local option value of_gres=""
  [[ $name =~ ^[A-Za-z0-9][A-Za-z0-9_.-]*$ ]] || fail "--name is '$name': give letters, digits, dots, - and _"
  folder=$root/slurm/$name
  [[ ! $gres =~ ^([^,]*,)*gpu(:[^:,]+)?:([0-9]+)(,|$) ]] || of_gres=${BASH_REMATCH[3]}
  : "${gpus:=${of_gres:-8}}"
  for option in nodes gpus margin attempts; do
    [[ ${!option} =~ ^[1-9][0-9]*$ ]] || fail "--$option is '${!option}': give a number, 1 or more"
  done
  [[ -z $gres || -n $of_gres ]] || fail "--gres is '$gres': give the GPUs of a box, for example gpu:8 or gpu:a100:8"
  [[ -z $gres || $gpus == "$of_gres" ]] || fail "--gpus is $gpus, but --gres is $gres: each GPU has a process, so give one"
  for value in "${asked[@]}" ${gres:+"$gres"}; do
    [[ $value =~ ^[]A-Za-z0-9_.,:=\&\|/@%+*()[~-]+$ ]] || fail "'$value' has characters that sbatch would read in its own way"
  done
  if [[ -n $environment ]]; then
    [[ -f $environment ]] || fail "--environment is $environment: there is no such file"
    environment=$(cd "$(dirname "$environment")" && pwd)/$(basename "$environment")
  fi
  [[ $dry_run == yes ]] || command -v squeue >/dev/null || fail "Slurm is not installed; --dry-run works without it"
}

if [[ ${1:-} == task ]]; then "$@"; else main "$@"; fi
