"""Try every architecture of the installed transformers; write what came of it.

``src/moesaic/assets/architectures.json`` is read by ``moesaic inspect`` and by
``docs/architectures.md``. Takes some minutes on one core; named model types alone are tried anew,
and ``--page`` only writes the page anew.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "src/moesaic/assets/architectures.json"
PAGE = ROOT / "docs/architectures.md"
HEAD = """# Architectures

```
moesaic inspect           # the lists of this page, with the full reason for each refusal
moesaic inspect --json
moesaic inspect MODEL           # whether a model is supported, and what its layers are
```

The lists name model types (`model_type` in `config.json`) of transformers {transformers}. Of each
type that is listed as supported, a tiny random model passed the [trials](#what-was-tried).
`deepseek` (DeepSeekMoE-16B), whose classes are in this package, is supported, too. A verb may
refuse a type that is listed here: its page names its limits. A model of a listed type is refused
where its config adds what no rule knows, such as the latent experts of Nemotron-3-Super
(`nemotron_h` with `moe_latent_size`).

Types of other versions may work, too: a rule finds layers, routers and experts. Another package
can add a type ([ARCHITECTURE.md](../ARCHITECTURE.md)).
"""
NAMED = "`moesaic inspect` names them all, each with its reason: GPT-2, BERT, OPT and others."
TAIL = """## What was tried

`make architectures` runs the trials of `tests/contract.py` and writes this page.

- **Mixtures of experts**: our own code computes what each block computes, also with fewer experts
  and with one expert a token. The layers, run one by one, are the whole model. A plan that keeps
  everything changes no byte. A pruned or slimmed model is the same live, saved and loaded, and
  rewritten on disk.
- **Dense models**: the same, with half of the neurons of each MLP.
- **Multimodal models**: the language model (`text_config`), as above.
  Its type decides: InternVL with a Qwen3 mixture is pruned as that mixture. The whole model is
  written again, and its other parts keep their bytes. Of a result that is not of the architecture's
  own class, such as a carved model, only the language model is written.
"""
KINDS = {
    "moe": "Mixtures of experts",
    "dense": "Dense models",
    "beside": "Multimodal models",
}
GROUPS = {
    r"Every decoder layer must have one plain MLP": "No plain MLP (two or three linear "
    "modules and an activation function) is in every decoder layer.",
    r"No list of \d+ decoder layers": "No list of decoder layers was found.",
    r"No tiny model of it|config\.json describes no": "No tiny model of it could be made by "
    "rule, so it was not tried.",
    r"No module of \w+ has one row": "No router was found.",
    r"It has parts beside text": "It is multimodal, and its language model is of another type.",
    r"[\w ]+: \w+Error:": "One of the trials failed.",
}
"""What the page says of reasons that many types share, by how those begin."""


def why(reason: str) -> str:
    """A reason as the page has it."""
    text = re.sub(r"^Its language model, \w+: ", "", reason)
    labels = (short for begins, short in GROUPS.items() if re.match(begins, text))
    return next(labels, reason).replace("|", "/")


def page(result: dict[str, Any]) -> str:
    """The document of a result."""
    parts = [HEAD.format(transformers=result["transformers"])]
    for kind, words in KINDS.items():
        parts.append(f"## {words}: {len(result[kind])}\n\n{listed(result[kind])}\n")
    often = Counter(why(reason) for reason in result["unsupported"].values()).most_common()
    rows = [f"| {reason} | {count} |" for reason, count in often]
    table = "\n".join(["| why | types |", "|---|---:|", *rows])
    named = f"{NAMED}\n\n{table}\n"
    parts.append(f"## Not supported: {len(result['unsupported'])}\n\n{named}")
    return "\n".join([*parts, TAIL])


def listed(names: Iterable[str]) -> str:
    """Names, as Markdown writes them."""
    return ", ".join(f"`{name}`" for name in names)


def note(result: dict[str, Any], model_type: str, kind: str, reason: str) -> None:
    """Put what came of a type's trials in the place of what is known of it.

    Args:
        result: as :data:`RESULT` has it; changed in place.
        model_type: the type.
        kind: one of :data:`KINDS`, which it is if it passed.
        reason: why it did not; empty if it did.
    """
    for label in KINDS:
        result[label] = [name for name in result[label] if name != model_type]
    result["unsupported"].pop(model_type, None)
    if reason:
        result["unsupported"][model_type] = reason
    else:
        result[kind].append(model_type)


def main() -> None:
    """Try them all, or the named ones anew, unless only the page is wanted."""
    names = [name for name in sys.argv[1:] if name != "--page"]
    if names or "--page" not in sys.argv:
        os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
        sys.path.insert(0, str(ROOT / "tests"))
        import transformers
        from contract import held
        from shrunken import TYPES, wholes

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        every = sorted(TYPES), sorted({*wholes()} - {*TYPES})
        alone, whole = ([n for n in some if n in names or not names] for some in every)
        result: dict[str, Any] = {"transformers": transformers.__version__}
        result |= {"moe": [], "dense": [], "beside": [], "unsupported": {}}
        if names:
            result |= json.loads(RESULT.read_text("utf-8"))
        for model_type in [*alone, *whole]:
            kind, reason = held(model_type)
            print(f"{model_type}: {kind} {reason}", flush=True)
            note(result, model_type, "beside" if model_type in whole else kind, reason)
        for label in KINDS:
            result[label].sort()
        result["unsupported"] = dict(sorted(result["unsupported"].items()))
        RESULT.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    PAGE.write_text(page(json.loads(RESULT.read_text("utf-8"))), "utf-8")


if __name__ == "__main__":
    main()
