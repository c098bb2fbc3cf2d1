#!/usr/bin/env bash
# Trains on Cloud TPU: `tpu_vm.py` beside this, with any Python from 3.11 on.
exec "$(bash "$(dirname "${BASH_SOURCE[0]}")/find_python.sh" "${PYTHON:-}")" "$(dirname "${BASH_SOURCE[0]}")/tpu_vm.py" "$@"
