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
pip install sentencepiece protobuf
[ -f "$folder/llama_cpp_python-$version.tar.gz" ] ||
    pip download --no-deps --no-binary :all: --dest "$folder" \
        "llama-cpp-python==$version"
# Virtual machines may announce AMX and stop with an illegal instruction when it is used (q8_0).
[ "$(uname -m)" = x86_64 ] && export CFLAGS="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
export CXXFLAGS="${CFLAGS:-}"
CMAKE_ARGS="-DLLAVA_BUILD=OFF" pip install "$folder/llama_cpp_python-$version.tar.gz"
tar -xzf "$folder/llama_cpp_python-$version.tar.gz" -C "$folder"
ln -sfn "llama_cpp_python-$version/vendor/llama.cpp" "$folder/llama.cpp"
