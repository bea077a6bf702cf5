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
    pip download --no-deps --no-binary llama-cpp-python --dest "$folder" \
        "llama-cpp-python==$version"
# Virtual machines may announce AMX and stop with an illegal instruction when it is used (q8_0).
# It wins over the -march=native that llama.cpp adds. Other compilers and machines have no such flag.
amx="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
if "${CC:-cc}" $amx -E - </dev/null >/dev/null 2>&1; then
    export CFLAGS="${CFLAGS:-} $amx" CXXFLAGS="${CXXFLAGS:-} $amx"
fi
CMAKE_ARGS="-DLLAVA_BUILD=OFF" pip install "$folder/llama_cpp_python-$version.tar.gz"
tar -xzf "$folder/llama_cpp_python-$version.tar.gz" -C "$folder"
ln -sfn "llama_cpp_python-$version/vendor/llama.cpp" "$folder/llama.cpp"
