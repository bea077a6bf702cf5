"""SmolLM2-135M carved by MoRE at active ratio 0.8, beside every comparison of the paper.

    python benchmarks/carve_smollm2.py [TEXT ...]      writes benchmarks/carve_smollm2.json

Calibrated on the shipped calibration text (100 windows of 256 tokens); measured on the shipped
evaluation text and on each TEXT given, at 512 tokens a window. The perplexity of the saved
checkpoint is computed a second time by a plain loop that uses transformers alone.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import moesaic
from moesaic import Evaluation, Recipe
from moesaic.data.reader import shipped_texts

TOKENS = 8192
PLAIN = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, text, tokens = sys.argv[1], open(sys.argv[2]).read(), int(sys.argv[3])
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
ids = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"][:tokens]
total = count = 0
for start in range(0, len(ids) - 511, 512):
    window = torch.tensor([ids[start:start + 512]])
    with torch.no_grad():
        out = model(input_ids=window, labels=window)
    total, count = total + out.loss.item() * 511, count + 511
print(json.dumps([total / count, count]))
"""


def plain_perplexity(folder: Path, text: str) -> float:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(text)
        file.flush()
        command = [sys.executable, "-c", PLAIN, str(folder), file.name, str(TOKENS)]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    return math.exp(json.loads(run.stdout.splitlines()[-1])[0])


def main(texts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as work:
        out = Path(work) / "more"
        recipe = Recipe(
            model="smollm2",
            out=str(out),
            steps=(moesaic.MoREConfig(active=0.8),),
            evaluation=Evaluation(
                max_tokens=TOKENS, compare=("static", "backbone", "random", "naive"), rounds=5
            ),
        )
        made = moesaic.run_recipe(recipe)
        assert made is not None
        record = made.as_json()
        shipped = "\n\n".join(shipped_texts("evaluation"))
        record["independent_perplexity"] = plain_perplexity(out, shipped)
        record["other_texts"] = {}
        static = Path(work) / "static"
        config = moesaic.MoREConfig(active=0.8, variant="static")
        moesaic.carve("smollm2", config).save(static)
        for text in texts:
            record["other_texts"][Path(text).name] = {
                name: moesaic.evaluate(str(model), data=text, max_tokens=TOKENS).as_json()
                for name, model in (("original", "smollm2"), ("result", out), ("static", static))
            }
        for key in ("samples", "out"):
            record.pop(key)
    Path(__file__).with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    for name, score in record["scores"].items():
        print(f"{name:10} {score['perplexity']:8.3f} active {score['active_ratio']:.4f}")
    print("independent", record["independent_perplexity"], record["other_texts"])


if __name__ == "__main__":
    main(sys.argv[1:])
