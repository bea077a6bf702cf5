#!/bin/sh
# What only a GPU can show, in order of worth, within about 40 minutes. Each part leaves its output in
# FOLDER as it ends, and is not run again: what was got is kept when the machine goes.
#   gpu_day.sh FOLDER            PYTHON=..., DEVICE=cpu to try the script itself
set -u
folder=${1:?where results go}
python=${PYTHON:-.venv/bin/python}
device=${DEVICE:-cuda}
models=${MODELS:-$folder/models}
mkdir -p "$folder" "$models"

part() { # name, seconds, command: its output and errors are name.txt, what it took name.json
    name=$1 limit=$2
    shift 2
    [ -f "$folder/$name.json" ] && return
    echo "== $name (at most $limit s)"
    start=$(date +%s)
    timeout "$limit" "$@" >"$folder/$name.txt" 2>&1
    code=$?
    printf '{"command": "%s", "exit_code": %d, "seconds": %d}\n' \
        "$(echo "$*" | tr '"' "'")" "$code" "$(($(date +%s) - start))" >"$folder/$name.json"
    [ "$code" = 0 ] || tail -n 3 "$folder/$name.txt"
}
moesaic() { part "$1" "$2" "$python" -m moesaic "$3" "$4" "$folder/made-$1" --device "$device" --overwrite --json $5; }
bench() { part "$1" "$2" "$python" -m moesaic bench "$3" --against "$4" --device "$device" --json $5; }

# 1. Right at all: the tests that want CUDA.
part tests 480 "$python" -m pytest -m gpu -rs tests

# 2. A real mixture's shape (28 GB): what deciding takes, and whether the result is faster.
shape=qwen1.5-moe-a2.7b
part mixture 300 "$python" benchmarks/shapes.py "$models" $shape --values random
moesaic slim 300 slim "$models/$shape" "--keep 0.5 --samples 16 --no-eval"
moesaic prune 300 prune "$models/$shape" "--keep 30 --samples 16 --no-eval"
moesaic skip 120 skip "$models/$shape" "--top-k 2 --no-eval"
for made in slim prune skip; do
    bench "speed-$made" 240 "$folder/made-$made" "$models/$shape" "--rounds 5"
done

# 3. Training: both papers that learn, for as long as there is.
moesaic tomoe 480 carve smollm2 "--method tomoe --active 0.8 -o steps=500 --max-tokens 16384"
moesaic dsmoe 480 carve smollm2 "--method dsmoe --active 0.8 -o steps=300 --max-tokens 16384"

# 4. vLLM with its own GPU kernels, where it is installed.
part engines 480 env ENGINES_JSON="$folder/engines.record.json" \
    "$python" -m pytest -m engines tests/engines -k "transformers or vllm"
echo "Results in $folder"
