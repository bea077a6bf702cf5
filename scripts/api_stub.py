"""Write the types of the library's verbs, src/moesaic/api.pyi, from the methods' own configs.

    python scripts/api_stub.py

Editors complete options by it, and type checkers check calls; ``tests/test_python.py`` fails where
it is stale.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import moesaic
from moesaic import api

STUB = Path(__file__).parents[1] / "src/moesaic/api.pyi"
HEAD = "# Written by scripts/api_stub.py (make docs-tables) from the configs of the methods.\n"
NAMES = {
    "moesaic.config": ("Calibration",),
    "moesaic.data.text": ("Tokens",),
    "moesaic.types": ("Model", "Named", "Tokenizer", "Track", "Values"),
    "moesaic.plan": ("Plan",),
    "moesaic.result": ("Result",),
    "collections.abc": ("Sequence",),
    "pathlib": ("Path",),
    "torch": ("Tensor",),
    "typing": ("Any", "Literal"),
}
"""Names of types in signatures, by their module."""


def stub() -> str:
    """The text of the stub."""
    defined, imported = [], []
    for name in api.__all__:
        function = getattr(api, name)
        if "__signature__" not in vars(function):
            imported.append(f"from {function.__module__} import {name} as {name}\n")
            continue
        lines = [f"    {_written(p)},\n" for p in inspect.signature(function).parameters.values()]
        position = next(i for i, line in enumerate(lines) if "=" in line and _keyword(function, i))
        if "    *,\n" not in lines:
            lines.insert(position, "    *,\n")
        returned = inspect.signature(function).return_annotation
        defined.append(f"def {name}(\n{''.join(lines)}) -> {returned}: ...\n")
    body = "".join(defined)
    words = {*re.findall(r"\w+", re.sub(r"'[^']*'", "", body))}
    configs = {name: getattr(moesaic, name).__module__ for name in words if name.endswith("Config")}
    modules = {**NAMES}
    for name, module in configs.items():
        modules[module] = (*modules.get(module, ()), name)
    for module, names in modules.items():
        used = sorted(words & {*names})
        imported += [f"from {module} import {', '.join(used)}\n"] if used else []
    return f"{HEAD}import torch\n{''.join(sorted(imported))}\n{body}"


def _keyword(function: object, index: int) -> bool:
    parameter = [*inspect.signature(function).parameters.values()][index]  # type: ignore[arg-type]
    return parameter.kind is inspect.Parameter.KEYWORD_ONLY


def _written(parameter: inspect.Parameter) -> str:
    """A parameter with its type and its default."""
    if parameter.default is parameter.empty:
        return f"{parameter.name}: {parameter.annotation}"
    default = "..." if parameter.default is ... else repr(parameter.default)
    return f"{parameter.name}: {parameter.annotation} = {default}"


if __name__ == "__main__":
    STUB.write_text(stub(), "utf-8")
