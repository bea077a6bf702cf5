"""What ``docs/engines.md`` is made of is what the suite of engines tries, all of it."""

import json
from pathlib import Path

from models import CASES
from test_engines import ENGINES

RECORD = Path(__file__).parents[2] / "benchmarks/engines.json"


def test_every_verb_was_tried_on_every_model_in_every_engine():
    record = json.loads(RECORD.read_text("utf-8"))
    tried = {
        (engine, model, verb)
        for model, verbs in record["outcomes"].items()
        for verb, cells in verbs.items()
        for engine, outcome in cells.items()
        if outcome != "failed"
    }
    assert tried == {(engine, *case) for engine in ENGINES for case in CASES}
    assert record["versions"].keys() == ENGINES.keys()
