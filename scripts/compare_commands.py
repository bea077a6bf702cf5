"""Run about thirty commands, and compare their results with those of another state of the code.

    python scripts/compare_commands.py run before.json      # with the code of before
    python scripts/compare_commands.py run after.json       # with the code of after
    python scripts/compare_commands.py compare before.json after.json

A result is the hash of every tensor, the perplexity to the last digit, and the CPU seconds. All
methods stand here, each on a model that ships, on little text; GGUF needs the extra ``gguf``. Exit
code 1 if two results differ, or a command of one is missing in the other.
"""

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

TEXT = "--samples 16 --length 128 --no-eval"
TRAIN = "-o steps=6 -o length=128 --no-eval"
COMMANDS = {
    **{
        f"prune {score}": f"prune tiny-moe OUT --keep 6 --score {score} {TEXT}"
        for score in ("reconstruction", "pairwise", "frequency", "reap", "weighted-ean", "aimer")
    },
    "prune paper": f"prune tiny-moe OUT --keep 6 --recipe paper {TEXT}",
    "prune shared": f"prune tiny-shared-moe OUT --keep 0.5 {TEXT}",
    "prune layers": f"prune tiny-moe OUT --keep 5 --allocate layers {TEXT}",
    "slim": f"slim tiny-moe OUT --keep 0.5 {TEXT}",
    "slim shared": f"slim tiny-shared-moe OUT --keep 0.5 {TEXT}",
    "slim energy": f"slim tiny-moe OUT --keep 0.5 --score energy --no-refit {TEXT}",
    "slim magnitude": f"slim tiny-moe OUT --keep 0.5 --score magnitude {TEXT}",
    "slim experts": f"slim tiny-moe OUT --keep 0.5 --allocate experts {TEXT}",
    "slim both": f"slim tiny-shared-moe OUT --keep 0.5 --allocate layers+experts {TEXT}",
    "slim dense": f"slim tiny-dense OUT --keep 0.75 {TEXT}",
    "slim paper": f"slim tiny-moe OUT --keep 0.5 --recipe paper {TEXT}",
    "skip": f"skip tiny-moe OUT --quantile 0.5 {TEXT}",
    "skip shared": f"skip tiny-shared-moe OUT --quantile 0.5 {TEXT}",
    "condense": f"condense tiny-shared-moe OUT --count 2 {TEXT}",
    "condense routed": f"condense tiny-moe OUT --count 1 --keep shared+routed {TEXT}",
    "condense nothing": f"condense tiny-moe OUT --count 1 --keep nothing {TEXT}",
    "condense paper": f"condense tiny-shared-moe OUT --count 2 --recipe paper {TEXT}",
    "more": f"carve tiny-dense OUT --method more --active 0.8 {TEXT}",
    "more paper": f"carve tiny-dense OUT --method more --recipe paper --active 0.8 {TEXT}",
    "tomoe": f"carve tiny-dense OUT --method tomoe --active 0.8 {TRAIN}",
    "tomoe paper": f"carve tiny-dense OUT --method tomoe --recipe paper --active 0.8 {TRAIN}",
    "dsmoe": f"carve tiny-dense OUT --method dsmoe --active 0.8 {TRAIN}",
    "tune": "tune {condense} OUT --steps 4 --length 128 --batch 2 --no-eval",
    "tune lora": "tune tiny-moe OUT --what lora --steps 4 --length 128 --batch 2 --no-eval",
    "fit": "fit tiny-moe OUT --memory 9MB --samples 8 --length 128 --max-tokens 2048",
    "export native": "export {slim} OUT --to native",
    "export petals": "export {more} OUT --to native",
    "export gguf": "export {slim} OUT --to gguf --type q8_0",
}
"""Command by name; ``{name}`` stands for the folder of an earlier one."""


def digests(folder: Path) -> dict[str, str]:
    """Hash by tensor of all safetensors files in ``folder``, and by file of its GGUF files."""
    found = {}
    for path in sorted(folder.rglob("*.safetensors")):
        if path.is_relative_to(folder / "moesaic"):
            continue
        with safe_open(path, "pt") as file:
            for name in file.keys():
                tensor = file.get_tensor(name)
                data = tensor.contiguous().view(-1).view(dtype=torch.uint8)
                key = f"{name} {tensor.dtype} {tuple(tensor.shape)}"
                found[key] = hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]
    for path in sorted(folder.rglob("*.gguf")):
        found[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return found


def carried_out(arguments: list[str]) -> tuple[int, str, float]:
    """Exit code, standard output and CPU seconds of one command."""
    from moesaic.cli import main

    begun, out = time.process_time(), StringIO()
    sys.argv = ["moesaic", *arguments]
    try:
        with redirect_stdout(out):
            main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    return code, out.getvalue(), time.process_time() - begun


def run(target: Path, names: list[str]) -> None:
    """Write the results of the commands ``names`` (all if empty) into the JSON file ``target``."""
    folder = Path(tempfile.mkdtemp())
    made = {name: folder / name.replace(" ", "-") for name in COMMANDS}
    results: dict[str, Any] = {}
    for name, command in COMMANDS.items():
        if names and name not in names:
            continue
        folders = {"OUT": made[name], **{f"{{{other}}}": path for other, path in made.items()}}
        arguments = [str(folders.get(word, word)) for word in command.split()]
        code, _, seconds = carried_out(arguments)
        result: dict[str, Any] = {"code": code, "seconds": round(seconds, 1)}
        if code == 0:
            result["tensors"] = digests(made[name])
            if not any(made[name].rglob("*.gguf")):
                measure = f"eval {made[name]} --length 128 --max-tokens 2048 --json"
                code, out, _ = carried_out(measure.split())
                result["perplexity"] = json.loads(out)["perplexity"] if code == 0 else None
        results[name] = result
        print(name, code, result["seconds"], result.get("perplexity"), file=sys.stderr, flush=True)
        target.write_text(json.dumps(results, indent=1), "utf-8")
    shutil.rmtree(folder)


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Print what differs, a line a command. Return 1 if anything does."""
    differ = 0
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            text = "only before" if new is None else "only after"
        else:
            tensors = old.get("tensors", {}), new.get("tensors", {})
            named = tensors[0].keys() | tensors[1].keys()
            changed = [one for one in named if tensors[0].get(one) != tensors[1].get(one)]
            text = "" if not changed else f"{len(changed)} of {len(tensors[0])} tensors differ"
            if old.get("perplexity") != new.get("perplexity") or old["code"] != new["code"]:
                text += f" perplexity {old.get('perplexity')} -> {new.get('perplexity')}"
                text += f" exit code {old['code']} -> {new['code']}"
        differ |= bool(text)
        times = f"{(old or {}).get('seconds')} -> {(new or {}).get('seconds')} CPU s"
        print(f"{name:20} {text or 'equal':60} {times}")
    return int(differ)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["run", "compare"])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--only", action="append", default=[], choices=list(COMMANDS))
    given = parser.parse_args()
    if given.what == "run":
        run(given.files[0], given.only)
    else:
        sys.exit(compare(*(json.loads(path.read_text("utf-8")) for path in given.files)))
