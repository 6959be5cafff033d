#!/bin/sh
# Say at once, and all together, what this machine lacks to build the package; `make` asks before it installs anything.
#
#   scripts/check_machine.sh [PYTHON]
set -eu

python=${1:-}
missing=
lacks() { missing="$missing
  - $1"; }

if [ -z "$python" ]; then
    lacks "Python 3.11 or newer (if it has another name: make BOOTSTRAP_PYTHON=/path/to/python ...)"
elif ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    lacks "Python 3.11 or newer: $python is older or does not start (another one: make BOOTSTRAP_PYTHON=/path/to/python ...)"
else
    # Debian and Ubuntu pack the second half of `python -m venv` separately.
    "$python" -c 'import ensurepip, venv' 2>/dev/null || lacks "Python's module venv with ensurepip"
    compiler=$("$python" -c 'import os, sysconfig; print(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")')
    headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    if ! command -v "${compiler%% *}" >/dev/null; then
        lacks "a C compiler (${compiler%% *}; another one: CC=name make ...)"
    # shellcheck disable=SC2086  # CC may be a command with options
    elif ! echo '#include <Python.h>' | $compiler -I"$headers" -fsyntax-only -x c - 2>/dev/null; then
        lacks "the header files of Python and of the C library (Python.h was not found or does not compile)"
    fi
fi

if [ -n "$missing" ]; then
    cat >&2 <<END
This machine lacks what the build needs:$missing
Then run make again. On
  Debian, Ubuntu   sudo apt install python3-dev python3-venv gcc make   (Ubuntu 22.04: python3.11-dev python3.11-venv)
  Fedora           sudo dnf install python3-devel gcc make
  macOS            xcode-select --install && brew install python@3.11
END
    exit 1
fi
