#!/bin/sh
# Build llama-cpp-python from PyPI's source package into a virtual environment, and unpack the
# llama.cpp it is made of into a folder, for its converter. Minutes on two cores.
#   setup_llamacpp.sh VENV FOLDER
set -eu
venv=$1
folder=$2
version=0.3.36
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

mkdir -p "$folder"
pip install scikit-build-core sentencepiece protobuf
[ -f "$folder/llama_cpp_python-$version.tar.gz" ] ||
    pip download --no-deps --no-build-isolation --no-binary :all: --dest "$folder" \
        "llama-cpp-python==$version"
CMAKE_ARGS="-DLLAVA_BUILD=OFF" pip install "$folder/llama_cpp_python-$version.tar.gz"
tar -xzf "$folder/llama_cpp_python-$version.tar.gz" -C "$folder"
ln -sfn "llama_cpp_python-$version/vendor/llama.cpp" "$folder/llama.cpp"
