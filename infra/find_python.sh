#!/usr/bin/env bash
# Prints the path of a Python from 3.11 on that can make virtual environments: `find_python.sh [NAME]`.
# Without a name the usual ones are tried; 3.11 first, since the tests run with it.
set -u

CHECK='
import sys
version = "%d.%d.%d" % sys.version_info[:3]
if sys.version_info < (3, 11):
    sys.exit(version + ", older than 3.11")
try:
    import ensurepip, venv
except ImportError:
    sys.exit("%s, without venv and ensurepip (Debian and Ubuntu: apt install python%d.%d-venv)"
             % ((version,) + sys.version_info[:2]))
print(sys.executable)
'

names=("${1:-python3.11}")
[[ -n ${1:-} ]] || names+=(python3.12 python3.13 python3.14 python3 python)

found=""
for name in "${names[@]}"; do
  command -v "$name" >/dev/null || continue
  said=$("$name" -c "$CHECK" 2>&1) && echo "$said" && exit
  found+=$'\n'"  $name: ${said%%$'\n'*}"
done

echo "Gregale needs a Python from 3.11 on, with venv. Found under ${names[*]}:${found:- nothing}
Install one (Debian and Ubuntu: apt install python3 python3-venv), or name one: make PYTHON=/path/to/python3" >&2
exit 1
