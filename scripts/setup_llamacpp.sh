#!/bin/sh
# Build llama-cpp-python from PyPI's source package, in a folder, into a virtual environment.
# Its llama.cpp stays in the folder, for the converter. Minutes on two cores.
#   setup_llamacpp.sh VENV FOLDER
set -eu
venv=$1
folder=$2
version=0.3.36
source="$folder/llama_cpp_python-$version"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

mkdir -p "$folder"
pip install sentencepiece protobuf
[ -f "$source.tar.gz" ] ||
    pip download --no-deps --no-binary llama-cpp-python --dest "$folder" \
        "llama-cpp-python==$version"
tar -xzf "$source.tar.gz" -C "$folder"
# It always builds what llama.cpp's own programs share, half of all, and installs none of it.
sed -i.orig 's/LLAMA_BUILD_COMMON ON/LLAMA_BUILD_COMMON OFF/' "$source/CMakeLists.txt"
# Virtual machines may announce AMX and stop with an illegal instruction when it is used (q8_0).
# It wins over the -march=native that llama.cpp adds. Other compilers and machines have no such flag.
amx="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
if "${CC:-cc}" $amx -E - </dev/null >/dev/null 2>&1; then
    export CFLAGS="${CFLAGS:-} $amx" CXXFLAGS="${CXXFLAGS:-} $amx"
fi
CMAKE_ARGS="-DLLAVA_BUILD=OFF" pip install "$source"
ln -sfn "llama_cpp_python-$version/vendor/llama.cpp" "$folder/llama.cpp"
