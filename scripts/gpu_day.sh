#!/bin/sh
# What only a GPU can show, most important first, in nine minutes on a bare machine without network.
#   gpu_day.sh --wheels WHEELS   where there is a network: fetch what images with torch 2.11 and
#                                transformers 5.17 lack (Python 3.12)
#   gpu_day.sh FOLDER            PYTHON=python3 WHEELS=.wheels SECONDS_LEFT=540 DEVICE=cuda
# DEVICE=cpu MODEL=tiny-moe tries the script itself. Each part leaves its output in FOLDER/NAME.txt and
# its time in FOLDER/NAME.json as it ends; a part that has a .json is not run again.
set -u
if [ "${1:?FOLDER, or --wheels WHEELS}" = --wheels ]; then
    python3 -m pip --disable-pip-version-check --quiet download --no-deps --only-binary=:all: \
        --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 \
        --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --dest "${2:?WHEELS}" \
        gguf pydantic==2.12.5 pydantic-core==2.41.5 typing-inspection annotated-types
    exit
fi
folder=$1
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
wheels=${WHEELS:-.wheels}
shape=${SHAPE:-qwen1.5-moe-a2.7b}
end=$(($(date +%s) + ${SECONDS_LEFT:-540}))
mkdir -p "$folder" "$folder/made"
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONPATH="$PWD/src:$folder/site${PYTHONPATH:+:$PYTHONPATH}"
if ! "$python" -c 'import gguf, pydantic' 2>/dev/null; then
    "$python" -m pip --disable-pip-version-check --quiet install --no-index --no-deps \
        --target "$folder/site" "$wheels"/*.whl
fi

part() { # name, seconds, command...: output in name.txt; time and exit code in name.json
    part=$1 limit=$2  # a shell's variables are everyone's: loops below have a name, too
    shift 2
    [ -f "$folder/$part.json" ] && return
    left=$((end - $(date +%s)))
    [ "$left" -lt 15 ] && echo "== $part: no time left" && return
    [ "$left" -lt "$limit" ] && limit=$left
    echo "== $part (at most $limit s)"
    start=$(date +%s)
    timeout "$limit" "$@" >"$folder/$part.txt" 2>&1
    code=$?
    printf '{"command": "%s", "exit_code": %d, "seconds": %d}\n' \
        "$(echo "$*" | tr '"' "'")" "$code" "$(($(date +%s) - start))" >"$folder/$part.json"
    [ "$code" = 0 ] || tail -n 3 "$folder/$part.txt"
}
moesaic() { part "$1" "$2" "$python" -m moesaic $3 --device "$4" --json; }
ratio() { # name, on the GPU, on the CPU: their seconds beside each other
    [ -f "$folder/$2.json" ] && [ -f "$folder/$3.json" ] && "$python" - "$folder" "$@" <<'PY'
import json, sys
folder, name, *both = sys.argv[1:]
gpu, cpu = (json.load(open(f"{folder}/{one}.json"))["seconds"] for one in both)
print(f"{name}: {gpu} s on the GPU, {cpu} s on the CPU")
PY
}

# 1. Right at all: the tests that want CUDA.
part tests 150 "$python" -m pytest -m gpu -rs -p no:cacheprovider tests
# 2. A generated mixture of real widths, six layers of it: deciding and converting, beside the CPU.
part model 60 "$python" benchmarks/shapes.py "$folder/made" "$shape" --layers 6 --values random
model=${MODEL:-$folder/made/$shape}
text="--samples 16 --no-eval --overwrite"
for verb in "prune --keep 0.5" "slim --keep 0.5"; do
    name=${verb%% *}
    moesaic "$name-gpu" 90 "$name $model $folder/made/$name ${verb#* } $text" "$device"
    moesaic "$name-cpu" 120 "$name $model $folder/made/$name-cpu ${verb#* } $text" cpu
    ratio "$name" "$name-gpu" "$name-cpu"
done
# 3. A budget, searched on the GPU.
moesaic fit-gpu 120 "fit $model $folder/made/fit --parameters ${PARAMETERS:-2e9} --samples 8 --overwrite" "$device"
# 4. Is what came out faster there?
for name in prune slim; do
    moesaic "speed-$name" 60 "bench $folder/made/$name --against $model --rounds 5" "$device"
done
echo "Results in $folder"
