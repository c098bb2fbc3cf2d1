#!/usr/bin/env bash
# Trains on Kubernetes: `../kube.py`, with the Python of .venv, which has PyYAML, or with any from 3.11 on.
infra=$(dirname "${BASH_SOURCE[0]}")/..
python=$infra/../.venv/bin/python
[[ -x $python ]] || python=""
exec "$(bash "$infra/find_python.sh" "${PYTHON:-$python}")" "$infra/kube.py" "$@"
