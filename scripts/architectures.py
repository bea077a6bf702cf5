"""Try every architecture of the installed transformers; write what came of it.

``src/moesaic/assets/architectures.json`` is read by ``moesaic architectures`` and by
``docs/architectures.md``. Takes some minutes on one core; ``--page`` only writes the page anew.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "src/moesaic/assets/architectures.json"
PAGE = ROOT / "docs/architectures.md"
HEAD = """# Architectures

Written by `make architectures` from what `tests/contract.py` found with transformers
{transformers}. `moesaic architectures` prints the lists, `--json` for programs.

A rule finds where a model keeps its decoder layers, router, experts, shared path and MLPs, and
which attributes of its config count them: `src/moesaic/arch/discovery.py`. A tiny random model of
every causal language model of transformers is then tried.

- Of a mixture: its block is what its view says; a set of experts is routed as it will be deployed;
  layers passed one by one are the whole model; a plan that keeps everything changes no byte;
  pruned and slimmed, it is the same model live, saved and loaded, and rewritten on disk.
- Of a dense model: its MLPs are what their views say; layers one by one; a plan that keeps
  everything; half of the neurons, live, saved and rewritten.
- Of a model with parts beside text, such as one that sees: its language model, the `text_config`,
  as above; pruned, it is whole again, and all other parts keep their bytes. A result that is of no
  architecture's own class is the language model alone. Listed are those of which a tiny one could
  be made; what counts is the language model's type, which may be another than the usual one:
  InternVL with a Qwen3 mixture is pruned as that mixture.

An architecture of a later transformers is not refused for being new: where the rule finds its
parts it is used, otherwise the error says what was found and what was not. Another package adds
one by an entry point, see [ARCHITECTURE.md](../ARCHITECTURE.md).
"""


KINDS = {
    "moe": "Mixtures of experts",
    "dense": "Dense models",
    "beside": "With parts beside text",
}


def page(found: dict[str, Any]) -> str:
    """The document of a result."""
    parts = [HEAD.format(transformers=found["transformers"])]
    for kind, words in KINDS.items():
        names = ", ".join(f"`{name}`" for name in found[kind])
        parts.append(f"## {words}: {len(found[kind])}\n\n{names}\n")
    odd = found["unsupported"]
    rows = [f"| `{name}` | {reason.replace('|', '/')} |" for name, reason in odd.items()]
    table = "\n".join(["| model_type | why |", "|---|---|", *rows])
    parts.append(f"## Not supported: {len(odd)}\n\n{table}\n")
    return "\n".join(parts)


def main() -> None:
    """Try them all, unless only the page is wanted."""
    if "--page" not in sys.argv:
        os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
        sys.path.insert(0, str(ROOT / "tests"))
        import transformers
        from contract import held
        from shrunken import TYPES, wholes

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        found: dict[str, Any] = {"transformers": transformers.__version__}
        found |= {"moe": [], "dense": [], "beside": [], "unsupported": {}}
        for model_type in sorted(TYPES):
            kind, reason = held(model_type)
            print(f"{model_type}: {kind} {reason}", flush=True)
            if reason:
                found[kind][model_type] = reason
            else:
                found[kind].append(model_type)
        for model_type in sorted({*wholes()} - {*TYPES}):
            kind, reason = held(model_type)
            print(f"{model_type}: {kind} {reason}", flush=True)
            if not reason:
                found["beside"].append(model_type)
        RESULT.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    PAGE.write_text(page(json.loads(RESULT.read_text("utf-8"))), "utf-8")


if __name__ == "__main__":
    main()
