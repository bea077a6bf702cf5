"""Tasks, divergence, generations, and models read layer by layer: equal to what they stand for."""

import copy
import json
import math
import re
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from builders import DENSE, VOCAB, launch, local_tasks, pages, stored, tiny_model, tiny_moe
from safetensors.torch import save_file
from torch.utils import collect_env
from transformers import AutoModelForCausalLM

import moesaic
from moesaic.data.sources import read_questions, wanted_tasks
from moesaic.data.text import Tokens, evaluation_tokens
from moesaic.distributed import join_processes, process
from moesaic.errors import MoesaicError
from moesaic.io.source import resolve
from moesaic.losses import divergence
from moesaic.metrics import evaluate as evaluating
from moesaic.metrics import measurement as measuring
from moesaic.metrics import tasks as tasking
from moesaic.metrics.forward import BATCH, InMemory, Layerwise
from moesaic.metrics.generations import PROMPTS, TEMPERATURES, generate, generations
from moesaic.metrics.score import _part, scores
from moesaic.metrics.tasks import task_manager
from moesaic.pipeline import run_recipe
from moesaic.recipe import parse_recipe
from moesaic.report import numbers, tables

ROWS = [
    {"question": "What colour is the sea?", "choices": ["blue", "red as a brick"], "answer": 0},
    {"question": "What barks?", "choices": ["a cat", "a dog", "stones"], "answer": "B"},
    {"question": "Où est-il né ?", "choices": ["à Orléans, en été", "Paris"], "answer": "Paris"},
    {"question": "Two and two?", "choices": ["five", "four", "six", "none"], "answer": 1},
    {"question": "Is ice cold?", "choices": ["yes", "no"], "answer": "A"},
]


@pytest.fixture
def questions(tmp_path):
    file = tmp_path / "few.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n", "utf-8")
    return file


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory):
    """Another llama of the same tokenizer."""
    return stored(tiny_model("llama", seed=1), tmp_path_factory.mktemp("other") / "llama")


# --- tasks of a local file -----------------------------------------------------------------------


def by_hand(model, tokenizer, prompt, choice):
    """The log-likelihood of a choice after a prompt, token by token."""
    ids = tokenizer(f"{prompt} {choice}")["input_ids"]
    start = len(tokenizer(prompt)["input_ids"])
    with torch.no_grad():
        log = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return sum(log[i - 1, ids[i]].item() for i in range(start, len(ids)))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_question_may_hold_what_elsewhere_ends_a_line(encoding, tmp_path):
    """And the file may begin with a byte order mark."""
    file = tmp_path / "one.jsonl"
    row = {"question": "a\u2028b\x85?", "choices": ["c", "d"], "answer": 1}
    file.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding)
    assert read_questions(file) == [row]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2"),
        ('["no"]', "not a JSON object"),
        ('{"question": "a?"}', "no choices and no answer"),
        ('{"question": "a?", "choices": ["b"], "answer": 0}', "not a list of two"),
        ('{"question": "a?", "choices": ["b", 3], "answer": 0}', "a choice is not text"),
        ('{"question": "a?", "choices": ["b", "c"], "answer": 2}', "answer 2 is none of 0 to 1"),
        ('{"question": "a?", "choices": ["b", "c"], "answer": true}', "answer True"),
        ('{"question": "a?", "choices": ["b", "b"], "answer": "b"}', "answer 'b'"),
        ('{"question": " ", "choices": ["b", "c"], "answer": 0}', "question is not text"),
        ('{"question": "a?", "choices": ["b", "\\ud83d"], "answer": 0}', "surrogates not allowed"),
    ],
)
def test_a_line_that_is_no_question_is_named(tmp_path, line, message):
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps(ROWS[0]) + "\n" + line, "utf-8")
    with pytest.raises(MoesaicError, match="line 2") as refusal:
        read_questions(file)
    assert message in str(refusal.value)
    assert '"choices"' in str(refusal.value), "it says what would work"


# --- divergence ----------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False])
def test_logits_of_one_batch_are_gone_before_those_of_the_next(whole, tmp_path):
    """Of a vocabulary of 262,144 those of a batch take a gigabyte. Of two models both are there."""
    model, made, alive = tiny_moe("mixtral"), [], []
    model.save_pretrained(tmp_path)
    other = InMemory(model) if whole else Layerwise(resolve(str(tmp_path)), keep=True)
    runs = [InMemory(model), other]

    def before(_, __):
        alive.append(sum(logits() is not None for logits in made))

    def after(_, __, logits):
        made.append(weakref.ref(logits))

    for head in {run.shape.lm_head for run in runs}:
        head.register_forward_pre_hook(before)
        head.register_forward_hook(after)
    scores(runs, Tokens(torch.zeros(3 * BATCH // 64, 64, dtype=torch.int64)))
    assert alive == [0, 1] * 3


def test_kl_is_the_sum_over_the_vocabulary():
    p, q = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[1.0, 0.5, -2.0]])
    a, b = p.softmax(-1)[0].tolist(), q.softmax(-1)[0].tolist()
    wanted = sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))
    found = divergence(p.log_softmax(-1), q.log_softmax(-1)).item()
    assert found == pytest.approx(wanted, rel=1e-5)
    never = torch.tensor([[0.0, 1.0, -torch.inf]]).log_softmax(-1)
    assert divergence(never, never).item() == 0


def test_a_token_counts_to_the_part_that_it_is_of_itself():
    """And not to that of the token before it, from which it is predicted."""
    model = tiny_model("llama")
    ids = torch.randint(1, VOCAB, (3, 9), generator=torch.Generator().manual_seed(5))
    part_NL = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 0, 0], [1] * 9, [0, 1] * 4 + [0]])
    found = scores([InMemory(model)], Tokens(ids, parts=("a", "b"), part_NL=part_NL))[0].sources
    with torch.no_grad():
        log_p = model(ids).logits[:, :-1].log_softmax(-1)
    losses = -log_p.gather(2, ids[:, 1:, None])[..., 0]
    for i, name in enumerate("ab"):
        own = losses[part_NL[:, 1:] == i]
        assert found[name].tokens == len(own)
        assert found[name].perplexity == pytest.approx(own.mean().exp().item(), rel=1e-5)


def test_divergence_agrees_with_a_plain_loop(llama_folder, other_folder, padded):
    runs = [InMemory(resolve(str(f)).load()) for f in (other_folder, llama_folder)]
    found, original = scores(runs, padded)
    agreed = count = 0
    divergences = []
    for ids, mask in zip(padded.input_ids, padded.attention_mask, strict=True):
        row = ids[mask][None]
        with torch.no_grad():
            q, p = (run.shape(row).logits[0, :-1].double().log_softmax(-1) for run in runs)
        divergences.append((p.exp() * (p - q)).sum().item())
        agreed += (p.argmax(-1) == q.argmax(-1)).sum().item()
        count += row.shape[1] - 1
    assert found.tokens == original.tokens == count
    assert found.kl == pytest.approx(sum(divergences) / count, rel=1e-5)
    of_windows = [kl * len(divergences) / count for kl in divergences]
    assert found.kl_N == pytest.approx(of_windows, rel=1e-5)
    assert found.top1_agreement == pytest.approx(agreed / count)
    assert found.perplexity == scores([runs[0]], padded)[0].perplexity
    assert original.perplexity == scores([runs[1]], padded)[0].perplexity
    same, _ = scores([runs[0], runs[0]], padded)
    assert (same.kl, same.top1_agreement) == (0, 1)


def test_other_vocabularies_are_refused_and_other_readers_compared(
    llama_folder, tmp_path, tokenizer, tokens, done, refused
):
    folder = tmp_path / "other"
    tiny_model("llama", seed=1).save_pretrained(folder)

    def rewritten(change):
        tokenizer.save_pretrained(folder)
        written = json.loads((folder / "tokenizer.json").read_text("utf-8"))
        change(written)
        (folder / "tokenizer.json").write_text(json.dumps(written), "utf-8")
        return "eval", llama_folder, "--against", folder, "--max-tokens", "512", "--json"

    def swapped(written):
        vocabulary = written["model"]["vocab"]
        first, second = list(vocabulary)[40:42]
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]

    def without_merges(written):  # as transformers' readers of other files cut text otherwise
        written["model"]["merges"] = []

    refused("--against: its vocabulary differs from the model's: ", *rewritten(swapped))
    save_file({"input_ids": tokens.input_ids}, tmp_path / "ids.safetensors")  # whatever they mean
    done(*rewritten(swapped), "--data", tmp_path / "ids.safetensors")
    figures = json.loads(done(*rewritten(without_merges)))
    assert figures["kl"] > 0
    assert figures["max_tokens"] == 512


# --- generations ---------------------------------------------------------------------------------


def test_generations_are_the_same_again_and_leave_random_numbers_alone(llama_folder, tokenizer):
    model = resolve(str(llama_folder)).load()
    torch.manual_seed(5)
    before = torch.rand(1)
    torch.manual_seed(5)
    first = generations(model, tokenizer, new_tokens=20)
    assert torch.rand(1) == before
    assert generations(model, tokenizer, new_tokens=20) == first
    assert list(first) == [f"{t:g}" for t in TEMPERATURES]
    assert all(found["n"] == len(PROMPTS) for found in first.values())


def test_greedy_is_greedy_whatever_the_models_own_config_says(llama_folder, tokenizer):
    model = resolve(str(llama_folder)).load()
    asked = {"tokenizer": tokenizer, "new_tokens": 12}
    found = generate(model, "The people", **asked)
    model.generation_config.repetition_penalty, model.generation_config.num_beams = 9.0, 2
    assert generate(model, "The people", **asked) == found


def test_a_model_that_says_one_word_loops(llama_folder, tokenizer):
    model = resolve(str(llama_folder)).load()
    with torch.no_grad():  # the head sees one direction alone, and one token has it
        model.lm_head.weight.zero_()
    found = generations(model, tokenizer, new_tokens=20)
    # all logits are equal: greedy takes the first token, which ends the text
    assert found["0"]["tokens"] == 0
    assert found["1"]["looping"] == 0
    assert found["1"]["distinct_1"] > 0.9
    model.generation_config.eos_token_id = None
    endless = copy.deepcopy(tokenizer)
    endless.eos_token, endless.pad_token = "!", "!"
    found = generations(model, endless, new_tokens=20)["0"]
    assert (found["looping"], found["tokens"]) == (1, 20)
    assert found["distinct_1"] == pytest.approx(1 / 20)
    assert found["repetition"] == pytest.approx(1 - 1 / 17)


# --- layer by layer ------------------------------------------------------------------------------


def test_ids_of_a_result_need_no_tokenizer(tokens, tmp_path):
    name = str(stored(tiny_moe("mixtral"), tmp_path / "model"))
    config = moesaic.PruneConfig(keep=6, score="aimer", refit=False)
    assert moesaic.prune(name, config, calibration=tokens).evaluate(data=tokens).kl > 0


@pytest.mark.parametrize("kind", ["llama_folder", "moe_folder", "carved_folder"])
def test_layer_by_layer_is_the_whole_model_bitwise(kind, request, tokenizer, padded):
    source = resolve(str(request.getfixturevalue(kind)))
    whole, layerwise = InMemory(source.load()), Layerwise(source)
    for tokens in (padded, evaluation_tokens("code=1,prose=1", tokenizer, 48, 2048 + 512)):
        assert scores([layerwise], tokens)[0] == scores([whole], tokens)[0]
    assert all(p.is_meta for p in layerwise.shape.parameters()), "weights were kept"


def test_divergence_layer_by_layer_is_bitwise(llama_folder, carved_folder, tokenizer):
    tokens = evaluation_tokens("code", tokenizer, 48, 2048 + 512)
    sources = [resolve(str(f)) for f in (carved_folder, llama_folder)]
    whole = scores([InMemory(s.load()) for s in sources], tokens)
    assert scores([Layerwise(s) for s in sources], tokens) == whole
    assert scores([InMemory(sources[0].load()), Layerwise(sources[1])], tokens) == whole
    assert whole[0].kl > 0


@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
def test_an_embedding_that_is_the_head_counts_once_either_way(family, tokens, tmp_path):
    made = tiny_model if family in DENSE else tiny_moe
    for name, seed in (("ours", 0), ("theirs", 1)):
        stored(made(family, seed=seed, tie_word_embeddings=True), tmp_path / name)
    names = {"model": tmp_path / "ours", "against": tmp_path / "theirs", "data": tokens}
    whole = moesaic.evaluate(**names).as_json()
    assert moesaic.evaluate(**names, stream=True).as_json() == whole
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert whole["total_parameters"] == sum(p.numel() for p in model.parameters())


def test_what_is_kept_passes_the_layers_once(llama_folder, carved_folder, padded, monkeypatch):
    """Comparison after comparison beside one original."""
    original = Layerwise(resolve(str(llama_folder)), keep=True)
    ours = InMemory(resolve(str(carved_folder)).load())
    first = scores([ours, original], padded)
    with monkeypatch.context() as patch:
        patch.setattr("moesaic.metrics.forward.LayerStream.from_disk", None)
        assert scores([ours, original], padded) == first
    other = Tokens(padded.input_ids.flip(0))
    alone = Layerwise(resolve(str(llama_folder)))
    assert scores([ours, original], other) == scores([ours, alone], other)


def test_what_does_not_fit_is_read_layer_by_layer(
    llama_folder, carved_folder, questions, monkeypatch
):
    options = {"length": 32, "max_tokens": 640, "data": pages("evaluation")}
    names = {"model": str(carved_folder), "against": str(llama_folder)}
    whole = moesaic.evaluate(**names, **options)
    monkeypatch.setattr(evaluating, "have_room", lambda *_: False)
    monkeypatch.setattr(evaluating.Source, "load", None)
    assert moesaic.evaluate(**names, **options) == whole
    for asked in ({"generations": True}, {"tasks": str(questions)}):
        with pytest.raises(MoesaicError, match=f"{next(iter(asked))} needs"):
            moesaic.evaluate(names["model"], **options, **asked)
    model = AutoModelForCausalLM.from_pretrained(carved_folder)
    with pytest.raises(MoesaicError, match="stream reads models from disk"):
        moesaic.evaluate(model, data=Tokens(torch.ones(2, 8, dtype=torch.int64)), stream=True)


def test_what_there_was_no_room_for_is_said(llama_folder, tmp_path, monkeypatch):
    for module in (evaluating, measuring):
        monkeypatch.setattr(module, "have_room", lambda *_: False)
    given = {
        "model": str(llama_folder),
        "out": str(tmp_path / "out"),
        "calibration": {"source": pages("calibration"), "samples": 4, "length": 32},
        "evaluation": {"data": pages("evaluation"), "length": 32, "max_tokens": 320},
        "steps": [{"carve": {"method": "more", "active": 0.9}}],
    }
    record = run_recipe(parse_recipe(json.dumps(given)))
    assert "speed" not in record.measured
    assert "continuations, speed, comparisons" in " ".join(record.log["warnings"])


def test_a_perplexity_beyond_float_is_a_number_that_json_has():
    assert 1e300 < _part(torch.tensor([4.0, 4000.0]), 0).perplexity < math.inf


def share(options, out, recipe):
    collect_env.get_pretty_env_info = str  # lm-eval asks pip what is there otherwise
    tasking.task_manager = local_tasks
    join_processes()
    found = moesaic.evaluate(**options, stream=True)
    routing = [(r.tokens, r.counts) for r in found.routing.values()]
    Path(f"{out}-{process()[0]}").write_text(json.dumps([found.as_json(), routing]))
    run_recipe(parse_recipe(recipe))


def test_processes_share_the_batches(llama_folder, carved_folder, moe_folder, questions, tmp_path):
    """Each has one of two, also of a recipe, whose record is that of one process."""
    asked = (
        f"model: {moe_folder}\nout: {tmp_path}/OUT\n"
        "steps: [{prune: {keep: 6, score: aimer, refit: false}}]\n"
        f"evaluation: {{data: {pages('evaluation')}, length: 48, max_tokens: 2100, rounds: 0, "
        f"new_tokens: 2, tasks: {questions}}}\n"
    )
    options = {"model": str(carved_folder), "against": str(llama_folder), "tasks": str(questions)}
    options |= {"length": 48, "max_tokens": 2100, "data": pages("evaluation")}
    launch(share, options, tmp_path / "out", asked.replace("OUT", "two"))
    alone = moesaic.evaluate(**options)
    routing = [[r.tokens, r.counts] for r in alone.routing.values()]
    wanted = json.loads(json.dumps([alone.as_json(), routing]))
    for number in range(2):
        assert json.loads((tmp_path / f"out-{number}").read_text()) == wanted
    run_recipe(parse_recipe(asked.replace("OUT", "one")))
    records = (tmp_path / out / "moesaic/result.json" for out in ("one", "two"))
    one, two = (json.loads(record.read_text()) for record in records)
    assert one["scores"] == two["scores"]
    assert one["scores"]["result"]["tasks"]["few"]["n"] == 5
    assert one["routing"] == two["routing"]


# --- the command ---------------------------------------------------------------------------------


def test_no_question_is_among_its_own_examples(tmp_path):
    """lm-eval leaves it out only where both are named to be of one split."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.task import ConfigurableTask

    rows = [{"question": f"{n}?", "choices": ["no", "yes"], "answer": n % 2} for n in range(6)]
    file = tmp_path / "own.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (task,) = wanted_tasks(str(file), shots=5)
    made = ConfigurableTask(config=dict(task.request))
    made.set_fewshot_seed(1234)
    for row in made.test_docs():
        asked = made.fewshot_context(row, num_fewshot=5)
        assert sorted(re.findall(r"(\d)\?", asked)) == list("012345")


def test_eval_prints_all_of_it(done, carved_folder, llama_folder, questions):
    given = ["eval", carved_folder, "--against", llama_folder]
    quick = ["--max-tokens", "320", "--length", "32", "--limit", "4", "--data", pages("evaluation")]
    found = json.loads(done(*given, "--tasks", questions, *quick, "--stream", "--json"))
    assert found["kl"] > 0
    assert 0 <= found["top1_agreement"] <= 1
    assert found["tasks"]["few"].keys() >= {"acc", "acc_norm", "stderr", "n"}
    assert found["tasks"]["few"]["n"] == found["against"]["tasks"]["few"]["n"] == 4
    assert "recovery" not in found["against"]["tasks"]["few"]
    out = done(*given[:2], "--tasks", questions, *quick)  # beside: see below
    for label in ("few, acc norm", "perplexity", "parameters a token uses", "MB"):
        assert label in " ".join(out.split()), label
    assert "nominal" not in out
    assert "bytes" not in out


def test_tasks_by_name_need_lm_eval(refused, llama_folder, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    said = "pip install 'moesaic[tasks] @ git+https"
    refused(said, "eval", llama_folder, "--tasks", "arc_easy")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shots", [0, 2])
def test_questions_of_a_file_are_a_task_of_lm_eval(questions, llama_folder, tokenizer, shots):
    """Whatever the file is called; the choices are those of the greatest log-likelihood."""
    questions = questions.rename(questions.with_name("arc_easy.jsonl"))
    model = AutoModelForCausalLM.from_pretrained(llama_folder).eval()
    (task,) = wanted_tasks(str(questions), shots)
    assert [q["answer"] for q in task.questions] == [0, 1, 1, 1, 0]
    found = tasking.measure_tasks(model, tokenizer, [task])["arc_easy"]
    assert found.keys() == {"acc", "acc_norm", "stderr", "acc_norm_stderr", "n"}
    assert found["n"] == 5
    if shots:
        return
    right, normed = 0, 0
    for question, row in zip(task.questions, ROWS, strict=True):
        prompt = f"Question: {row['question']}\nAnswer:"
        likely = [by_hand(model, tokenizer, prompt, choice) for choice in row["choices"]]
        per = [v / len(c) for v, c in zip(likely, row["choices"], strict=True)]
        right += likely.index(max(likely)) == question["answer"]
        normed += per.index(max(per)) == question["answer"]
    assert (found["acc"], found["acc_norm"]) == (right / 5, normed / 5)
    acc = found["acc"]
    assert found["stderr"] == pytest.approx(math.sqrt(acc * (1 - acc) / 4))


@pytest.mark.filterwarnings("ignore")
def test_unknown_tasks_and_absent_data(llama_folder, tmp_path, monkeypatch):
    """Of lm-eval's thousands of tasks two folders stand for all, which take seconds to read."""
    there = pytest.importorskip("lm_eval.tasks")
    some = [str(Path(there.__file__).with_name(name)) for name in ("arc", "sciq")]
    manager = there.TaskManager(include_defaults=False, include_path=some)
    monkeypatch.setattr(tasking, "task_manager", lambda named: manager if named else None)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    quick = {"length": 32, "max_tokens": 64}
    unknown = "tasks 'arc_eazy' is no task of lm-eval; perhaps arc_"
    with monkeypatch.context() as patched:  # before anything is computed
        patched.setattr("moesaic.metrics.evaluate.ScoredModels", None)
        with pytest.raises(MoesaicError, match=unknown):
            moesaic.evaluate(str(llama_folder), tasks="arc_eazy", **quick)
        patched.setattr("moesaic.pipeline.convert", None)
        asked = f"{{model: {llama_folder}, out: o, steps: [carve: {{}}], evaluation: {{tasks: a}}}}"
        with pytest.raises(MoesaicError, match="'a' is no task"):
            run_recipe(parse_recipe(asked))
    with pytest.raises(MoesaicError, match="'sciq': its data set is not on this machine"):
        moesaic.evaluate(str(llama_folder), tasks="sciq", **quick)


@pytest.mark.filterwarnings("ignore")
def test_every_task_of_the_papers_lists_is_lm_evals(monkeypatch):
    there = pytest.importorskip("lm_eval.tasks")
    files = Path(there.__file__).parent.rglob("*.y*ml")
    lines = (re.findall(r"^(?:task|group): *(\S+)$", f.read_text("utf-8"), re.M) for f in files)
    known = {name.strip("'\"") for found in lines for name in found}
    for preset in tasking.PRESETS:
        assert {task.name for task in wanted_tasks(preset)} <= known
    assert len(wanted_tasks("naee")) == 8
    assert [t.shots for t in wanted_tasks("more")] == [0, 0, 0, 0, 5]
    monkeypatch.setattr(there, "TaskManager", dict)
    for named in (True, False):
        assert task_manager.__wrapped__(named) == {"include_defaults": named}


# --- recipes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_recipe_measures_tasks_and_reports_them(
    llama_folder, questions, tmp_path, stream, monkeypatch
):
    brief = partial(generations, new_tokens=8)
    monkeypatch.setattr("moesaic.metrics.measurement.repeated", brief)
    asked = {"data": pages("evaluation"), "length": 32, "max_tokens": 320, "tasks": str(questions)}
    quick = {"rounds": 0, "new_tokens": 4, "generations": not stream, "compare": ("static",)}
    settings = moesaic.Evaluation(**asked, **quick, stream=stream)
    text = moesaic.Calibration(pages("calibration"), samples=8, length=32)
    steps = (moesaic.MoREConfig(layers="all"),)
    out = tmp_path / "out"
    record = moesaic.run_recipe(moesaic.Recipe(str(llama_folder), str(out), steps, text, settings))
    scores = record.measured["scores"]
    assert {*scores} == {"original", "result", "static"}
    alone = moesaic.evaluate(str(out), against=str(llama_folder), **asked)
    for name in ("perplexity", "kl", "top1_agreement", "tasks"):
        assert scores["result"][name] == getattr(alone, name)
    theirs, ours = (scores[name]["tasks"]["few"]["acc_norm"] for name in ("original", "result"))
    shown = tables.task_table(record)
    assert shown.columns == ["original", "result", "static", "recovery"]
    ((label, cells),) = shown.rows
    assert label == "few, acc norm"
    assert cells[1].text == numbers.percent(ours, 1)
    assert cells[3].text == numbers.percent(ours / theirs if theirs else None, 1)
    card = (out / "README.md").read_text("utf-8")
    page = (out / "moesaic/report.html").read_text("utf-8")
    for shown in (card, page):
        assert "few, acc norm" in shown
        assert "KL from the original" in shown
        assert ("end in a loop" in shown) is not stream
    kept = json.loads((out / "moesaic/result.json").read_text("utf-8"))
    assert kept["scores"]["result"]["tasks"]["few"]["n"] == 5
    assert kept["evaluation"].get("layer_by_layer", False) is stream


def test_a_padded_vocabulary_is_compared_without_its_padding():
    """Also one that got more tokens; not one of another size."""
    tokens, model = Tokens(torch.randint(1, 60, (3, 16))), tiny_model("llama")
    padded = copy.deepcopy(model)
    size = model.config.vocab_size
    padded.resize_token_embeddings(size + 5, mean_resizing=False)
    for pair in ((padded, model), (model, padded)):
        ours, theirs = scores([*map(InMemory, pair)], tokens)
        assert ours.kl == pytest.approx(0, abs=1e-6)
        assert ours.top1_agreement == 1
        assert ours.perplexity == pytest.approx(theirs.perplexity)
    padded.resize_token_embeddings(2 * size, mean_resizing=False)
    with pytest.raises(MoesaicError, match=f"predicts {size:,} tokens, the model {2 * size:,}"):
        scores([InMemory(padded), InMemory(model)], tokens)


def test_anybodys_checkpoint_is_judged(done, refused, llama_folder, tmp_path):
    """A sentence, KL with its interval, quantised files beside it; as Markdown, too."""
    theirs = tiny_model("llama")
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if "down_proj" in name:
                weight.mul_(0.5)
    stored(theirs, tmp_path / "theirs")
    asked = ["eval", tmp_path / "theirs", "--against", llama_folder, "--max-tokens", 600]
    asked += ["--length", 32, "--baseline", "q8_0", "--data", pages("evaluation")]
    figures = json.loads(done(*asked, "--json"))
    low, high = figures["kl_interval"]
    assert 0 <= low < figures["kl"] < high
    assert 0 < figures["baselines"]["q8_0"]["kl"] < figures["kl"]
    shown = done(*asked)
    assert "KL from the original" in shown
    card = done(*asked, "--card")
    assert "| KL from the original, nats | – |" in card
    assert "q8\\_0" in card
    for wrong in (["--card"], ["--baseline", "q8_0"]):
        refused("needs --against", "eval", tmp_path / "theirs", *wrong)
