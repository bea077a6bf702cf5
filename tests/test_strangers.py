"""Files of strangers: whatever they say, there is a result or one message, in bounded memory."""

import json
import shutil
import struct
import sys
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import edited, few_forms, pages, stored, tiny_moe
from jinja2 import TemplateError
from rich.table import Table
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import moesaic
from moesaic import MoesaicError, Plan, PruneConfig, report
from moesaic.data import rows
from moesaic.data.text import calibration_tokens
from moesaic.io.source import resolve
from moesaic.io.trust import header_of
from moesaic.observation.files import StatsFile, observe
from moesaic.progress import Plain
from moesaic.recipe import parse_recipe
from moesaic.record import Record

sys.path.append(str(Path(__file__).parent / "faults"))
from damage import ALIASES, entry, header

Command = Callable[..., tuple[int, str, str]]
QUICK = ("--keep", 6, "--score", "aimer", "--no-refit", "--no-eval")
CLEAR = "\x1b[2J\x1b]0;stolen\x07\u202e"
"""Clears a terminal, gives it a title, and turns what follows around."""


def is_message(err):
    """Whether stderr holds one printable message of bounded length."""
    message = err.partition("Error: ")[2]
    return 0 < len(message) <= 1000 and message.replace("\xa0", "").isprintable()


# --- messages ------------------------------------------------------------------------------------


def test_no_name_steers_the_terminal(refused, theirs):
    index = theirs / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    for name in (CLEAR, f"{CLEAR}{'x' * 300}"):
        edited(index, weight_map={**places, "more": name})
        assert is_message(refused("", "inspect", theirs))
    edited(index, weight_map={**places, "x" * 10**6: "gone.safetensors"})
    assert is_message(refused("", "inspect", theirs))


def test_messages_are_printable_and_bounded_wherever_they_are_read():
    message = str(MoesaicError(f"{CLEAR}{'x' * 10**6} pass keep=3"))
    assert message.isprintable()
    assert len(message) < 1000
    assert message.endswith("pass keep=3")


def test_tables_titles_and_cards_are_printable(command, carved_folder, tmp_path):
    run = Path(shutil.copytree(carved_folder, tmp_path / "run"))
    record = run / "moesaic/result.json"
    plain = json.loads(record.read_text())
    plain["steps"][0] |= {"title": f"carved {CLEAR}", "text": CLEAR}
    plain["model"] = f"a{CLEAR}b"
    record.write_text(json.dumps(plain))
    assert command("report", run, "--out", tmp_path / "a.html")[0] == 0
    parsed = Record.from_json(plain)
    assert parsed.model == plain["model"]  # what is kept is as it was
    console = Plain()
    table = Table(title=CLEAR)
    table.add_column(f"h{CLEAR}")
    table.add_row(f"c{CLEAR}")
    with console.capture() as shown:
        console.print(table)
        console.print(report.terminal(parsed))
    page = (tmp_path / "a.html").read_text("utf-8")
    for text in (shown.get(), page, report.model_card(parsed, "")):
        assert not {"\x1b", "\x07", "\u202e"} & {*text}


# --- headers -------------------------------------------------------------------------------------


ODD_HEADERS: dict[str, Callable[[Path], None]] = {
    "no place": entry(data_offsets=None),
    "a place of words": entry(data_offsets=["0", "64"]),
    "a place of fractions": entry(data_offsets=[0.5, 64]),
    "one end": entry(data_offsets=[0]),
    "a place below 0": entry(data_offsets=[-64, 0]),
    "a shape that is a number": entry(shape=3),
    "a shape of words": entry(shape=["x"]),
    "a shape below 0": entry(shape=[-1, -4]),
    "a type that is a list": entry(dtype=["F32"]),
    "another key": entry(more=1),
    "an entry that is a list": header(lambda it: it.update(x=[1])),
    "metadata that are a number": header(lambda it: it.update(__metadata__=7)),
    "metadata of numbers": header(lambda it: it.update(__metadata__={"a": 7})),
    "a list": header(lambda it: "[]"),
    "a number": header(lambda it: "7"),
    "deep": header(lambda it: '{"a":' * 400 + "1" + "}" * 400),
    "a long number": header(lambda it: '{"a": {"shape": [' + "9" * 4000 + "]}}"),
}


@pytest.mark.parametrize("change", ODD_HEADERS.values(), ids=ODD_HEADERS)
def test_a_header_of_other_types_is_refused(theirs, change):
    change(theirs)
    with pytest.raises(MoesaicError, match=r"safetensors is missing, truncated or corrupt"):
        _ = resolve(str(theirs)).checkpoint


def test_a_name_twice_among_many_is_found_at_once(tmp_path):
    """Each name was counted in all of them: this took hours."""
    names = [*(f'"{i}": 0' for i in range(400_000)), '"399999": 0']
    text = ("{" + ",".join(names) + "}").encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(MoesaicError, match="'399999' is there twice"):
        header_of(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    "name", ["generation_config.json", "tokenizer.json", "chat_template.jinja"]
)
def test_a_side_file_of_many_bytes_is_not_read(theirs, name):
    with (theirs / name).open("wb") as file:
        file.truncate(1 << 36)  # takes no room
    with pytest.raises(MoesaicError, match=rf"{name} has 68,719,476,736 bytes"):
        moesaic.prune(str(theirs), keep=6)


OF_BASE = {"widths": ["\ud800"] * 4, "hidden_size": "32", "experts": 3, "model_type": None}


def test_what_a_converted_model_says_of_its_base_is_checked(carved_folder, tmp_path):
    config = json.loads((carved_folder / "config.json").read_text())
    odd = (None, [], *({**config["moesaic"]["base"], k: v} for k, v in OF_BASE.items()))
    short = {**config["moesaic"]["base"], "widths": [64]}
    refused = [*((base, "config.json, moesaic cannot be read") for base in odd)]
    for base, words in (*refused, (short, "1 widths of")):
        section = {**config["moesaic"], "base": base}
        (tmp_path / "config.json").write_text(json.dumps({**config, "moesaic": section}))
        with pytest.raises(MoesaicError, match=words):
            moesaic.inspect(str(tmp_path))


STATISTICS = {"layers": "x", "gram": [], "base": None, "tokens": "9", "sources": [1], "samples": {}}


def test_statistics_of_other_types_are_refused(moe_folder, tmp_path):
    text = {"samples": 2, "length": 16}
    file = observe(str(moe_folder), tmp_path / "stats.safetensors", **text)
    before = file.read_bytes()
    for key, value in STATISTICS.items():

        def edit(held, key=key, value=value):
            ours = {**json.loads(held["__metadata__"]["moesaic"]), key: value}
            held["__metadata__"]["moesaic"] = json.dumps(ours)

        file.write_bytes(before)
        header(edit)(file)
        with pytest.raises(MoesaicError, match=f"stats.safetensors cannot be read: {key} is"):
            StatsFile(file)
    file.write_bytes(before)
    header(lambda held: held["__metadata__"].update(moesaic="[]"))(file)
    with pytest.raises(MoesaicError, match="not a file of moesaic observe"):
        StatsFile(file)


PLANS = {
    "base.widths": 3, "base.hidden_size": "32", "base.model_type": None, "base.more": 1,
    "layers.0": [], "layers": [1], "layers.x": {}, "method": 3,
    "config": [], "calibration": 7, "earlier": 5, "format": [3],
}  # fmt: skip


def test_a_plan_of_other_types_is_refused(moe_folder, tmp_path):
    plan = moesaic.prune(str(moe_folder), PruneConfig(keep=6, score="aimer", refit=False)).plan
    plan.save(tmp_path)
    file = tmp_path / "plan.json"
    before = file.read_text()
    for path, value in PLANS.items():
        content = inside = json.loads(before)
        *keys, last = path.split(".")
        for key in keys:
            inside = inside[key]
        inside[last] = value
        file.write_text(json.dumps(content))
        with pytest.raises(MoesaicError):
            Plan.load(tmp_path)


# --- JSON of models ------------------------------------------------------------------------------

CONFIGS = {
    "a list of numbers of layers": {"num_hidden_layers": [2]},
    "words": {"hidden_size": "32"},
    "outputs without names": {"return_dict": False},
    "layers of a part": {"vision_config": {"num_hidden_layers": 10**9}},
    "layers beyond any": {"num_hidden_layers": 10**9, "model_type": "qwen2"},
    "a head beyond memory": {"head_dim": 10**10},
    "more experts for a token than there are": {"num_experts_per_tok": 99},
    "no experts for a token": {"num_experts_per_tok": 0},
    "quantised as words": {"quantization_config": "fp8"},
    "quantised in a list": {"quantization_config": [1]},
    "blocks of words": {"quantization_config": {"quant_method": "fp8", "weight_block_size": "xy"}},
    "blocks of nothing": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0]}},
    "groups that are a list": {
        "quantization_config": {"quant_method": "compressed-tensors", "config_groups": ["x"]}
    },
    "bits that are words": {
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"a": {"weights": {"num_bits": "four", "type": "int"}}},
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_a_config_of_other_types_is_refused(refused, theirs, tmp_path, little_memory, changes):
    edited(theirs / "config.json", **changes)
    for line in (("prune", theirs, tmp_path / "out", *QUICK), ("eval", theirs, "--max-tokens", 64)):
        assert is_message(refused("", *line))


def test_an_empty_format_is_none(theirs):
    edited(theirs / "config.json", quantization_config={})
    model = resolve(str(theirs)).load()
    assert not hasattr(model.config, "quantization_config")


def test_inspect_does_not_pass_over_weights_that_are_no_file(theirs):
    for file in theirs.glob("model*"):
        file.unlink()
    (theirs / "model.safetensors").mkdir()
    with pytest.raises(MoesaicError, match="is missing, truncated"):
        moesaic.inspect(str(theirs))


NO_SETTINGS = {
    **dict.fromkeys(("null", "[]", "7"), "holds no JSON object"),
    '{"max_new_tokens": -1}': "must be greater than 0",
    '{"cache_implementation": "mine"}': "Invalid .cache_implementation",
}


@pytest.mark.parametrize("content", NO_SETTINGS)
def test_generation_settings_that_cannot_be_used_are_refused(theirs, content):
    (theirs / "generation_config.json").write_text(content)
    words = f"^[^.]*/generation_config.json .*{NO_SETTINGS[content]}"
    with pytest.raises(MoesaicError, match=words):
        resolve(str(theirs)).load()
    with pytest.raises(MoesaicError, match=words):
        moesaic.prune(str(theirs), keep=6, score="aimer", refit=False)


def test_an_index_that_transformers_does_not_read_is_refused_by_every_verb(theirs: Path) -> None:
    index = theirs / "model.safetensors.index.json"
    held = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": held["weight_map"]}))
    with pytest.raises(MoesaicError, match="index.json has no metadata, .*add .metadata.: {}"):
        moesaic.prune(str(theirs), keep=6, score="aimer", refit=False)


def test_settings_of_how_it_is_run_do_not_stop_a_result(theirs: Path, tmp_path: Path) -> None:
    """transformers would not write this one beside the kind of attention that a run chose."""
    edited(theirs / "config.json", output_attentions=True)
    result = moesaic.prune(str(theirs), keep=6, score="frequency", samples=2, length=16)
    assert (result.save_pretrained(tmp_path / "out") / "config.json").is_file()


@pytest.mark.parametrize(
    "name", ["consolidated.safetensors", "model.fp16.safetensors", "a.gguf", "model.onnx", "a.h5"]
)
def test_a_dry_run_refuses_the_weights_that_a_run_does(refused, theirs, tmp_path, name):
    for file in theirs.glob("model*"):
        file.unlink()
    (theirs / name).write_bytes(bytes(100))
    line = ("prune", theirs, tmp_path / "out", *QUICK)
    assert refused("holds", *line, "--dry-run") == refused("holds", *line)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("config.json", '{"a":' * 300 + "1" + "}" * 300),
        ("config.json", '{"vocab_size": ' + "9" * 400 + "}"),
        ("config.json", b"\xff\xfe{}"),
        ("model.safetensors.index.json", '{"weight_map": ' + "[" * 300 + "]" * 300 + "}"),
        ("tokenizer_config.json", {"model_max_length": "many"}),
        ("tokenizer_config.json", {"model_max_length": [1]}),
        ("tokenizer_config.json", {"padding_side": 7}),
    ],
)
def test_json_beyond_what_any_file_holds_is_refused(refused, theirs, tmp_path, name, change):
    file = theirs / name
    if isinstance(change, dict):
        edited(file, **change)
    else:
        file.write_bytes(change if isinstance(change, bytes) else change.encode())
    line = ("--keep", 6, "--score", "frequency", "--samples", 2, "--length", 16, "--no-eval")
    assert is_message(refused("", "prune", theirs, tmp_path / "out", *line))


# --- recipes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        f"{ALIASES}model: *i\n",
        f"{ALIASES}model: m\nout: o\nsteps: [{{prune: *i}}]\n",
        "a: &a [*a]\nmodel: *a\nout: o\nsteps: [{prune: {}}]\n",
        f"model: m\nout: o\nsteps: [{{prune: {{keep: 0x{'f' * 5000}}}}}]\n",
        "model: m\nout: o\nsteps: [{prune: {keep: 6}}]\n" + "#" * 200_000,
        'model: "\\ud800"\nout: o\nsteps: [{prune: {keep: 6}}]\n',
        'model: "nul\\0"\nout: o\nsteps: [{prune: {keep: 6}}]\n',
    ],
    ids=["aliases", "aliases as options", "itself", "a long number", "long", "no UTF-8", "NUL"],
)
def test_a_recipe_that_grows_is_refused(text, little_memory):
    with pytest.raises(MoesaicError) as refusal:
        parse_recipe(text)
    assert len(str(refusal.value)) < 1000


def test_a_recipe_may_repeat_itself():
    text = "x: &all {keep: 6}\nmodel: m\nout: o\nsteps: [{prune: *all}]\n"
    with pytest.raises(MoesaicError, match="x is not an option"):  # and nothing of aliases
        parse_recipe(text)


# --- GGUF ----------------------------------------------------------------------------------------


def gguf_text(text):
    return struct.pack("<Q", len(text)) + text


def gguf_field(name, kind, value):
    return gguf_text(name.encode()) + struct.pack("<I", kind) + value


def gguf_of(*fields, tensors=0):
    start = b"GGUF" + struct.pack("<IQQ", 3, tensors, len(fields) + 1)
    architecture = gguf_field("general.architecture", 8, gguf_text(b"llama"))
    return start + architecture + b"".join(fields) + b"\0" * 64


ENDLESS = {
    "values": gguf_of(gguf_field("x", 9, struct.pack("<IQ", 0, 2**60))),
    "words": gguf_of(gguf_field("x", 9, struct.pack("<IQ", 8, 2**60))),
    "lists": gguf_of(gguf_field("x", 9, struct.pack("<IQ", 9, 2**40))),
    "a text": gguf_of(gguf_field("x", 8, struct.pack("<Q", 2**62))),
    "a token": gguf_of(
        gguf_field("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 1) + gguf_text(b"a" * 200_000))
    ),
    "layers": gguf_of(gguf_field("llama.block_count", 4, struct.pack("<I", 10_000))),
    "experts": gguf_of(gguf_field("llama.expert_count", 4, struct.pack("<I", 10**6))),
    "tensors": gguf_of(tensors=2**50),
    "a type": gguf_of(gguf_field("x", 77, b"")),
    "no fields": b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60),
    "cut": b"GGUF\x03\0\0",
}


@pytest.mark.parametrize("content", ENDLESS.values(), ids=ENDLESS)
def test_a_gguf_header_that_never_ends_is_refused(refused, tmp_path, content, little_memory):
    (tmp_path / "x.gguf").write_bytes(content)
    assert is_message(refused("", "inspect", tmp_path / "x.gguf"))


# --- chat templates ------------------------------------------------------------------------------

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b " * 50}]
SOUND = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TEMPLATES = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "doubles": "{% set n = namespace(x='ab') %}"
    "{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "multiplies": "{{ 'x' * 10**11 }}",
    "pads": "{{ 'x'|center(10**11) }}",
    "raises": "{{ 9**(9**9) }}",
    "writes": "{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
    "calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "adds words": "{{ messages + 1 }}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_chat_template_is_bounded(tokenizer, template, monkeypatch):
    monkeypatch.setattr(rows, "SECONDS", 1.0)
    monkeypatch.setattr(tokenizer, "chat_template", template + SOUND)
    with pytest.raises(MoesaicError, match="chat template"):
        calibration_tokens([{"messages": TURNS}], tokenizer, 1, 4)


def test_a_chat_template_is_rendered_as_transformers_does(tokenizer, monkeypatch):
    for template in (SOUND, SOUND.replace(":", " says")):  # a changed one is not remembered
        monkeypatch.setattr(tokenizer, "chat_template", template)
        for prompt in (False, True):
            expected = tokenizer.apply_chat_template(
                TURNS, tokenize=False, add_generation_prompt=prompt
            )
            assert rows.rendered(tokenizer, TURNS, add_generation_prompt=prompt) == expected
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('roles') }}")
    with pytest.raises(TemplateError, match="roles"):
        rows.rendered(tokenizer, TURNS)
    with pytest.raises(MoesaicError, match="refuses a conversation .roles"):
        calibration_tokens([{"messages": TURNS}], tokenizer, 1, 4)


def test_a_daemon_renders_chat_templates_too(tokenizer, monkeypatch):
    """Workers of a pool are daemons, which multiprocessing lets have no child."""
    monkeypatch.setattr(tokenizer, "chat_template", SOUND)
    expected = tokenizer.apply_chat_template(TURNS, tokenize=False)
    fork = get_context("fork")
    pipe, there = fork.Pipe()
    worker = fork.Process(target=lambda: there.send(rows.rendered(tokenizer, TURNS)), daemon=True)
    worker.start()
    there.close()
    assert pipe.recv() == expected
    worker.join()


# --- records -------------------------------------------------------------------------------------

HEAT = {"section": "s", "title": "t", "kind": "heat", "columns": ["0"],
        "rows": [{"label": "0", "values": [0.5]}]}  # fmt: skip
MEASURED = {"scores": {"result": {"perplexity": 3.0}}}
RECORDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a form of 2 GB": lambda r: r["steps"][0].update(figures=[{**HEAT, "form": "2000000000f"}]),
    "a form of words": lambda r: r["steps"][0].update(figures=[{**HEAT, "form": "x"}]),
    "experts without end": lambda r: r["layers"][0].update(experts=10**9),
    "digits": lambda r: json.dumps(r)[:-1] + ', "scores": {"result": {"kl": 1' + "0" * 400 + "}}}",
    "deep": lambda r: r.update(scores=json.loads("[" * 450 + "]" * 450)),
    "many models": lambda r: r.update(scores={str(i): {"kl": 1.0} for i in range(20_000)}),
    "a huge number": lambda r: r.update(scores={"result": {"total_parameters": 10**299}}),
    "rows that are cut": lambda r: r["steps"][0].update(figures=[{**HEAT, "columns": []}]),
    "routing in words": lambda r: r.update(MEASURED, routing={"0": "x"}),
    "routing by number": lambda r: r.update(MEASURED, routing={"0": 3}),
    "shares that are lists": lambda r: r.update(MEASURED, routing={"0": {"share": [[]]}}),
}


@pytest.mark.parametrize("change", RECORDS.values(), ids=RECORDS)
def test_a_record_of_any_numbers_is_answered(
    command, carved_folder, tmp_path, little_memory, change
):
    run = Path(shutil.copytree(carved_folder, tmp_path / "run"))
    file = run / "moesaic/result.json"
    content = json.loads(file.read_text())
    changed = change(content)
    file.write_text(changed if isinstance(changed, str) else json.dumps(content))
    code, _, err = command("report", run, "--out", tmp_path / "a.html")
    assert code == 0 or (code == 2 and is_message(err)), err
    if change is not RECORDS["a huge number"]:
        assert code == 2


# --- any change ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The folder that the faults of ``make faults`` start from."""
    import fuzz
    from commands import FIRST, begun

    def call(line):
        assert fuzz.called(line)[0] == 0

    place = tmp_path_factory.mktemp("faults") / "sound"
    begun(place, call, [*FIRST.values()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moesaic.fitting.search.forms", few_forms)
        fuzz.prepare(place)
        yield place


@pytest.mark.parametrize("rounds", [1, pytest.param(4, marks=pytest.mark.nightly)])
def test_any_change_of_keys_and_types_ends_in_a_result_or_a_message(rounds, sound, monkeypatch):
    """A sample of ``make faults``, which tries thousands."""
    import fuzz

    monkeypatch.chdir(sound)
    monkeypatch.setenv("XDG_CACHE_HOME", str(sound.parent / "cache"))
    outcomes = [(n, *fuzz.tried(n, sound)) for n in range(rounds * len(fuzz.KINDS))]
    assert not [o for o in outcomes if o[2] not in ("result", "refused")]
    assert {o[2] for o in outcomes} == {"result", "refused"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_statistics_of_no_text_are_refused(value, tmp_path, moe_folder, refused):
    """They decided: of experts without a score those of the first numbers were removed."""
    calibration = torch.randint(1, 99, (2, 32))
    file = observe(str(moe_folder), tmp_path / "stats.safetensors", calibration=calibration)
    held, about = load_file(file), safe_open(file, "pt").metadata()
    damaged = {n: torch.full_like(t, value) for n, t in held.items() if n.endswith("norm_E")}
    save_file(held | damaged, file, about)
    line = "prune", moe_folder, tmp_path / "out", "--stats", file, "--keep", 6, "--score", "ean"
    words = "below 0" if value == -1 else "not finite"
    assert "norm_E" in refused(words, *line, "--no-eval")


@pytest.fixture
def copy_of_mixtral(tmp_path):
    """A function that returns a new folder of the same tiny Mixtral, in one file."""
    whole = stored(tiny_moe("mixtral"), tmp_path / "mixtral")
    numbers = iter(range(9))
    return lambda: Path(shutil.copytree(whole, tmp_path / f"copy-{next(numbers)}"))


def weights_without(folder, *names, **more):
    file = folder / "model.safetensors"
    held = {n: t for n, t in load_file(file).items() if n not in names}
    save_file(held | more, file, {"format": "pt"})


EXPERT = "model.layers.0.block_sparse_moe.experts.0.w1.weight"


def test_a_tensor_that_others_do_not_make_up_is_named(copy_of_mixtral, refused, tmp_path):
    """One expert's is missing, or experts are stored one by one and together."""
    for name, line in (("eval", ()), ("prune", (tmp_path / "out", "--keep", 6))):
        folder = copy_of_mixtral()
        weights_without(folder, EXPERT)
        words = "do not make up model.layers.0.mlp.experts.gate_up_proj"
        said = refused(words, name, folder, *line)
        assert "one is missing" in said
    folder = copy_of_mixtral()
    weights_without(folder, **{"model.layers.0.mlp.experts.gate_up_proj": torch.ones(8, 32, 32)})
    refused("do not make up", "prune", folder, tmp_path / "out", "--keep", 6)


def test_a_number_of_5000_digits_is_no_layers(copy_of_mixtral, command, tmp_path):
    folder = copy_of_mixtral()
    weights_without(folder, **{f"model.layers.{'9' * 5000}.x.weight": torch.ones(2)})
    text = "--calibration", pages("calibration"), "--samples", 2, "--length", 16, "--no-eval"
    assert command("prune", folder, tmp_path / "out", "--keep", 6, *text)[0] == 0


def rules(folder, **changes):
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


REPEATED = "((((((((((x*)*)*)*)*)*)*)*)*)*)*y"
ODD_RULES = {
    "up to 1000 times as long": {
        "normalizer": {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 1000}
    },
    "retry-limit-in-match": {
        "pre_tokenizer": {
            "type": "Split", "pattern": {"Regex": REPEATED}, "behavior": "Isolated",
            "invert": False,
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("words", ODD_RULES)
def test_rules_of_a_tokenizer_that_explode_are_refused(words, copy_of_mixtral, refused, tmp_path):
    folder = copy_of_mixtral()
    rules(folder, **ODD_RULES[words])
    text = "--calibration", pages("calibration"), "--samples", 2, "--length", 16
    said = refused(words, "prune", folder, tmp_path / "out", "--keep", 6, *text)
    assert "no usable tokenizer" in said


def test_a_prompt_and_its_continuation_fit_the_positions(copy_of_mixtral, command, refused):
    folder = copy_of_mixtral()
    refused("leaves none of the model's 256 positions", "generate", folder, "a " * 300)
    assert command("generate", folder, "a", "--new-tokens", 10**8)[0] == 0
    (folder / "generation_config.json").write_text('{"eos_token_id": "x"}')
    refused("generation_config.json", "generate", folder, "a", "--new-tokens", 2)
    file = folder / "chat_template.jinja"
    file.write_text("{{ 'a b ' * 2000000 }}")
    refused("writes more than 50,", "generate", folder, "a", "--chat")


def test_an_index_names_files(copy_of_mixtral, refused):
    folder = copy_of_mixtral()
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    refused("no model.safetensors or model.safetensors.index.json", "inspect", folder)
    index = folder / "model.safetensors.index.json"
    for places, words in (({"a": "\ud800"}, "no file's name"), ([], "has no weight_map")):
        index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
        refused(words, "inspect", folder)
    (folder / "w.bin").write_bytes(b"PK\x03\x04" + bytes(99))
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"a": "w.bin"}}))
    refused("pickled weights", "inspect", folder)


@pytest.mark.parametrize("tag", ["!!bool x", "!!timestamp x", "!!int x"])
def test_a_value_that_does_not_suit_its_tag_is_refused(tag, tmp_path, refused):
    file = tmp_path / "odd.yaml"
    file.write_text(f"model: tiny-moe\nout: out\nsteps:\n- prune:\n    keep: {tag}\n")
    refused("odd.yaml is not valid YAML", "run", file)


def test_token_ids_may_be_unsigned(moe_folder, tmp_path, command):
    file = tmp_path / "ids.safetensors"
    for kind in (torch.uint16, torch.uint32, torch.uint64):
        save_file({"input_ids": torch.randint(1, 99, (2, 16)).to(kind)}, file)
        out = tmp_path / str(kind)
        line = "prune", moe_folder, out, "--keep", 6, "--calibration", file, "--no-eval"
        assert command(*line)[0] == 0
