#!/usr/bin/env bash
# Trains on Kubernetes: builds the image, writes the JobSet of a run (`jobset.py`) and gives it to kubectl. `--help`
# tells how. Needs kubectl, logged in, JobSet in the cluster, docker for `image`, and a Python with PyYAML.
script=train.sh
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
dry_run=no
# shellcheck source=infra/common.sh
. "$root/infra/common.sh"

readonly QUESTION=60 BUILD=3600 # limits in seconds

usage() {
  cat <<'TEXT'
usage: infra/k8s/train.sh COMMAND [OPTIONS]

commands:
  image IMAGE --for cpu|cuda|tpu [--base IMAGE] [--push]
                                                           build the image from infra/Dockerfile, and push it
  up CONFIG --image IMAGE --accelerator KIND ...           write the JobSet of a run and apply it; `jobset.py --help`
                                                           lists the options; keys to override come after --
  status NAME   the JobSet and its pods
  log NAME      follow the log of the first pod; Ctrl-C ends the following, not the training
  stop NAME     take the pods away with time to save a checkpoint; the JobSet stays
  resume NAME   go on after `stop`
  delete NAME   the JobSet and its pods; what is on the claim stays

options:
  --namespace NAME   default: kubectl's own
  --context NAME     default: kubectl's own
  --dry-run          print every command and the manifest, run none

A key of a tracker is no option: put it into a Secret, `kubectl create secret generic NAME --from-env-file=FILE`, and
give `--environment-secret NAME`.
TEXT
}

kube() {
  local runner=()
  while [[ $1 != : ]]; do runner+=("$1") && shift; done
  "${runner[@]}" kubectl "${place[@]}" "${@:2}"
}

image() {
  local name=${words[0]:-} target="" arguments=() push=no
  [[ -n $name && $name != -* ]] || fail "image needs the image's name, with a tag"
  set -- "${words[@]:1}"
  while (($#)); do
    case $1 in
      --for) target=$(value_of "$@") && shift 2 ;;
      --base) arguments+=(--build-arg "BASE=$(value_of "$@")") && shift 2 ;;
      --push) push=yes && shift ;;
      *) fail "'$1' is no option of image" ;;
    esac
  done
  [[ $target =~ ^(cpu|cuda|tpu)$ ]] || fail "--for is '$target': give cpu, cuda or tpu"
  limited "$BUILD" docker build "--file=$root/infra/Dockerfile" --build-arg "TARGET=$target" "${arguments[@]}" \
    "--tag=$name" "$root" || return
  [[ $push == no ]] || limited "$BUILD" docker push "$name"
}

up() {
  local python=${PYTHON:-$root/.venv/bin/python} text
  command -v "$python" >/dev/null || python=python3
  text=$("$python" "$root/infra/k8s/jobset.py" "${words[@]}") || exit
  if [[ $dry_run == yes ]]; then
    quoted timeout --kill-after=10 "$QUESTION" kubectl "${place[@]}" apply --filename=-
    printf '# %s\n' "${text//$'\n'/$'\n# '}"
    return
  fi
  [[ -n $scratch ]] || scratch=$(mktemp -d)
  echo "$text" >"$scratch/jobset.yaml"
  kube limited "$QUESTION" : apply "--filename=$scratch/jobset.yaml"
}

status() {
  kube limited "$QUESTION" : get jobset "$name" --output=wide || return
  kube limited "$QUESTION" : get pods "--selector=jobset.sigs.k8s.io/jobset-name=$name" --output=wide
}

follow_log() {
  kube run : logs --follow --tail=-1 \
    "--selector=jobset.sigs.k8s.io/jobset-name=$name,jobset.sigs.k8s.io/job-index=0,$FIRST_POD" --max-log-requests=1
}

# Kueue starts a JobSet that somebody else suspended again, so a JobSet with a queue is stopped by its workload.
suspend() {
  local queue uid
  kube ask "$QUESTION" : get jobset "$name" "--output=jsonpath={.metadata.uid} {.metadata.labels.kueue\\.x-k8s\\.io/queue-name}" || return
  read -r uid queue <<<"$answer" || true
  if [[ -z $queue ]]; then
    merge "jobset/$name" "{\"spec\":{\"suspend\":$1}}"
    return
  fi
  kube ask "$QUESTION" : get workloads.kueue.x-k8s.io "--selector=kueue.x-k8s.io/job-uid=$uid" --output=name || return
  [[ -n $answer ]] || fail "$name has the queue $queue, but Kueue has no workload for it"
  merge "$answer" "{\"spec\":{\"active\":$2}}"
}

merge() { kube limited "$QUESTION" : patch "$1" --type=merge "--patch=$2"; }

stop() { suspend true false; }

resume() { suspend false true; }

delete() { kube limited "$QUESTION" : delete jobset "$name" --wait=false; }

readonly FIRST_POD=batch.kubernetes.io/job-completion-index=0

main() {
  local command=${1:-} needs=kubectl
  words=() place=() name=""
  case $command in
    image) needs=docker ;;
    up | status | stop | resume | delete) ;;
    log) command=follow_log ;;
    -h | --help | help) usage && return ;;
    "") usage >&2 && exit 2 ;;
    *) fail "there is no command '$command'; commands: image, up, status, log, stop, resume, delete" ;;
  esac
  shift
  while (($#)); do
    case $1 in
      --namespace | --context)
        place+=("$1=$(value_of "$@")")
        shift 2
        ;;
      --dry-run) dry_run=yes && shift ;;
      -h | --help) usage && return ;;
      --) words+=("$@") && break ;;
      *) words+=("$1") && shift ;;
    esac
  done
  if [[ $command != image && $command != up ]]; then
    name=${words[0]:-}
    [[ $name =~ ^[a-z0-9]([a-z0-9-]*[a-z0-9])?$ ]] || fail "the name of the run is '$name': give that of its JobSet"
    ((${#words[@]} == 1)) || fail "'${words[1]}' is no option of $1"
  fi
  [[ $dry_run == yes ]] || command -v "$needs" >/dev/null || fail "$needs is not installed; --dry-run works without it"
  "$command"
}

main "$@"
