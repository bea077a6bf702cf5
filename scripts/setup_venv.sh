#!/bin/sh
# Make a virtual environment and install the project into it.
#   setup_venv.sh VENV [EXTRA]
# torch comes as a CPU build where there is no NVIDIA GPU, which saves gigabytes.
set -eu
venv=$1
extra=${2:+[$2]}
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    if command -v nvidia-smi >/dev/null 2>&1; then
        pip install torch
    else
        echo "Installing torch (CPU build) ..."
        pip --retries 0 --timeout 15 install --no-deps torch==2.13.0 \
            --index-url https://download.pytorch.org/whl/cpu 2>/dev/null ||
            pip install --no-deps torch==2.13.0
    fi
fi
echo "Installing moesaic$extra ..."
pip install --editable ".$extra"
