"""Architectures: the paths of their parts, and the decisions of their routers."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

from moesaic.types import JSON

FILE = "assets/architectures.json"


@cache
def support_table() -> JSON:
    """Return the findings for every causal language model of the installed transformers.

    Returns:
        ``transformers``, its version; ``moe`` and ``dense``, lists of ``model_type``; ``beside``,
        those with parts beside a language model; ``unsupported``, the reason by ``model_type``.
    """
    return json.loads(files("moesaic").joinpath(FILE).read_text("utf-8"))
