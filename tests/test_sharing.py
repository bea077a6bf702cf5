"""Results that are pushed and fetched: to the hub, and out of a cache as its library lays it."""

import base64
import hashlib
import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from builders import contents, edited, equal, inside, weights
from huggingface_hub import HfApi, constants, file_download, snapshot_download
from huggingface_hub.file_download import _create_symlink, _get_pointer_path, repo_folder_name

import moesaic
from moesaic import MoesaicError, Plan, PruneConfig, Record
from moesaic.io.source import headers_of_model, resolve

TOKEN, COMMIT = "hf_standin", "0" * 40


class Hub(BaseHTTPRequestHandler):
    """What uploading and fetching ask of the hub; all files are small ones to it."""

    repos: dict[str, dict[str, bytes]]

    def log_message(self, *_):
        pass

    def answer(self, code, body, **headers):
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def say(self, said, code=200):
        self.answer(code, json.dumps(said).encode(), Content_Type="application/json")

    def do_POST(self):
        given = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.say({"error": "Invalid credentials"}, 401)
        elif self.path == "/api/validate-yaml":
            self.say({"errors": [], "warnings": []})
        elif self.path == "/api/repos/create":
            said = json.loads(given)
            name = f"{said.get('organization') or 'me'}/{said['name']}"
            self.repos.setdefault(name, {})
            self.say({"url": f"{constants.ENDPOINT}/{name}", "id": name})
        elif "/preupload/" in self.path:
            each = {"uploadMode": "regular", "shouldIgnore": False}
            self.say({"files": [{"path": f["path"], **each} for f in json.loads(given)["files"]]})
        elif "/commit/" in self.path:
            name = self.path.removeprefix("/api/models/").partition("/commit/")[0]
            for line in given.decode().splitlines():
                operation = json.loads(line)
                if operation["key"] == "file":
                    value = operation["value"]
                    self.repos[name][value["path"]] = base64.b64decode(value["content"])
                elif operation["key"] == "deletedFile":
                    del self.repos[name][operation["value"]["path"]]
            url = f"{constants.ENDPOINT}/{name}/commit/{COMMIT}"
            self.say({"commitUrl": url, "commitOid": COMMIT})
        else:
            self.say({"error": self.path}, 404)

    def do_GET(self):
        path = self.path.partition("?")[0]
        name, _, file = path.strip("/").partition(f"/resolve/{COMMIT}/")
        if file and file in self.repos.get(name, {}):
            body = self.repos[name][file]
            tag = f'"{hashlib.sha256(body).hexdigest()}"'
            self.answer(200, body, ETag=tag, X_Repo_Commit=COMMIT)
            return
        name = path.removeprefix("/api/models/").partition("/revision/")[0].partition("/tree/")[0]
        if name not in self.repos or file:
            self.answer(404, b"{}", X_Error_Code="RepoNotFound")
        elif "/tree/" in path:
            self.say(
                [
                    {"type": "file", "path": f, "size": len(b), "oid": hashlib.sha1(b).hexdigest()}
                    for f, b in self.repos[name].items()
                ]
            )
        else:
            files = [{"rfilename": file} for file in self.repos[name]]
            self.say({"id": name, "sha": COMMIT, "siblings": files})

    do_HEAD = do_GET


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The repositories of a stand-in of the hub, that somebody is logged in to."""
    Hub.repos = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    address = f"{constants.ENDPOINT}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield Hub.repos
    server.shutdown()
    thread.join()
    server.server_close()


QUICK = ("--keep", 6, "--score", "random", "--samples", 4, "--length", 32, "--no-eval")
STEPS = """
model: {model}
out: {out}
dtype: bfloat16
calibration: {{samples: 4, length: 32}}
evaluation: null
steps:
- prune: {{keep: 6, refit: true}}
- slim: {{keep: 0.5}}
- skip: {{}}
"""


def test_a_plan_rebuilds_all_steps(done, refused, moe_folder, tmp_path):
    """Also in another type than the base's, from the base and from a result between."""
    out, again, between = tmp_path / "out", tmp_path / "again", tmp_path / "between"
    (tmp_path / "recipe.yaml").write_text(STEPS.format(model=moe_folder, out=out))
    done("run", tmp_path / "recipe.yaml")
    assert len(Plan.load(out).earlier) == 2
    done("apply", out, again)
    for name in inside(again) - {"moesaic/files.json"}:
        assert (again / name).read_bytes() == (out / name).read_bytes(), name
    first, *_ = Plan.load(out).earlier
    between.mkdir()
    first.save(between)
    done("apply", between, tmp_path / "first")
    moesaic.apply(str(tmp_path / "first"), out, again, overwrite=True)
    assert equal(weights(out), weights(again))
    refused("was made for a qwen2_moe", "apply", "tiny-moe", out, tmp_path / "never")


def test_a_result_is_pushed_whole(hub, done, tmp_path, monkeypatch):
    """From its folder, and as it is in Python."""
    out = tmp_path / "out"
    done("prune", "tiny-moe", out, *QUICK)
    shards = ("model-00001-of-00002.safetensors", "model.safetensors.index.json")
    stale = *shards, "chat_template.jinja", "added_tokens.json", "moesaic/model-q8_0.gguf"
    hub["me/whole"] = dict.fromkeys([*stale, "notes.md"], b"of an earlier result")
    assert moesaic.push(out, "whole").endswith("/me/whole")
    files = hub["me/whole"]
    assert files.keys() == {*inside(out), "notes.md"}
    assert files["model.safetensors"] == (out / "model.safetensors").read_bytes()
    assert "from_pretrained('me/whole')" in files["README.md"].decode()
    with pytest.raises(MoesaicError, match="is not a result of ours"):
        moesaic.push(tmp_path, "me/nothing")
    assert "me/nothing" not in hub
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    result = moesaic.prune("tiny-moe", FAST)
    assert result.push_to_hub("you/it", token=TOKEN) == f"{constants.ENDPOINT}/you/it"
    assert {"model.safetensors", "moesaic/plan.json", "README.md"} <= hub["you/it"].keys()
    assert "from_pretrained('you/it')" in hub["you/it"]["README.md"].decode()


@pytest.mark.parametrize(
    ("name", "lacking", "message"),
    [
        ("a/b/c", "", "no repository such as"),
        ("me/it", "token", "hf auth login"),
        ("me/it", "network", "HF_HUB_OFFLINE"),
    ],
)
def test_what_cannot_be_pushed_is_said_first(
    name, lacking, message, refused, tmp_path, monkeypatch
):
    """Before anything is computed or written."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", lacking == "network")
    if lacking == "token":
        monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    refused(message, "prune", "tiny-moe", tmp_path / "out", *QUICK, "--push", name)
    assert not [*tmp_path.iterdir()]


def test_a_file_alone_is_not_pushed(hub, command, tmp_path, monkeypatch):
    """A search that ends without a step leaves no result that has a card."""
    record = Record("tiny-moe", "out", "mixtral", True, [], [], measured={"tried": []})
    monkeypatch.setattr("moesaic.fitting.run.search_and_make", lambda *_, **__: record)
    line = ("fit", "tiny-moe", tmp_path / "out", "--memory", "9MB", "--push", "me/x")
    code, _, err = command(*line)
    assert (code, "Not pushed" in err) == (0, True), err
    assert not hub


def test_a_push_that_is_refused_leaves_the_result(hub, refused, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    out = tmp_path / "out"
    err = refused("failed", "prune", "tiny-moe", out, *QUICK, "--push", "me/it")
    assert f"The result is in {out}" in err
    assert (out / "model.safetensors").exists()


def test_a_connection_that_fails_while_pushing_is_named(hub, refused, tmp_path, monkeypatch):
    """It is no fault of ours, and the result is not lost."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    err = refused("push", "prune", "tiny-moe", tmp_path / "out", *QUICK, "--push", "me/it")
    assert "failed (ConnectError" in err
    assert f"The result is in {tmp_path / 'out'}" in err


FAST = PruneConfig(keep=6, score="aimer", refit=False)
TEMPLATE = "additional_chat_templates/tool.jinja"


def laid(cache, name, files, shared, links=True):
    """A snapshot as ``hf_hub_download`` lays it; ``shared``: large files, for all repositories."""
    storage = cache / repo_folder_name(repo_id=name, repo_type="model")
    for file, content in files.items():
        digest = hashlib.sha256(content).hexdigest()
        blob = storage / "blobs" / digest
        pointer = Path(_get_pointer_path(str(storage), COMMIT, file))
        for place in (blob, pointer):
            place.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        if shared and file.endswith((".safetensors", "tokenizer.json")):
            store = pytest.importorskip("huggingface_hub.utils._shared_blobs")
            key = hashlib.sha256(b"xet" + content).hexdigest()
            assert store.publish_blob_to_shared_store(
                blob_path=str(blob), xet_hash=key, cache_dir=cache, expected_size=len(content)
            )
            assert blob.is_symlink()
        _create_symlink(str(blob), str(pointer), new_blob=not shared)
        assert pointer.is_symlink() is links
    file_download._cache_commit_hash_for_specific_revision(str(storage), "main", COMMIT)
    return storage / "snapshots" / COMMIT


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The hub's cache, which is not where it is by default."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    return tmp_path / "elsewhere"


@pytest.mark.parametrize("layout", ["blobs", "shared", "copies"])
def test_what_the_hubs_library_lays_is_read(cache, done, moe_folder, tmp_path, monkeypatch, layout):
    """By the name, by the snapshot's folder and by a link to it; without a connection."""
    if layout == "copies":  # as on Windows
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_SYMLINKS", True)
        monkeypatch.setattr(file_download, "are_symlinks_supported", lambda *_: False)
    files = {**contents(moe_folder), TEMPLATE: b"{{ tools }}"}
    snapshot = laid(cache, "you/it", files, layout == "shared", layout != "copies")
    (tmp_path / "link").symlink_to(snapshot)
    expected = weights(moesaic.prune(str(moe_folder), FAST).save(tmp_path / "expected"))
    names = ("you/it", str(snapshot), str(tmp_path / "link"))
    for number, name in enumerate(names if layout != "copies" else names[:1]):
        out = moesaic.prune(name, FAST).save(tmp_path / f"out-{number}")
        assert equal(weights(out), expected)
        assert not any(path.is_symlink() for path in out.rglob("*"))
        assert (out / TEMPLATE).read_text() == "{{ tools }}"
    for line in (
        ("inspect", "you/it"),
        ("prune", "you/it", tmp_path / "dry", "--keep", 6, "--dry-run"),
        ("slim", "you/it", tmp_path / "dry", "--keep", 0.5, "--dry-run"),
    ):
        done(*line)


def test_a_model_in_a_folder_of_a_snapshot_is_read(cache, moe_folder):
    files = {f"half/{name}": content for name, content in contents(moe_folder).items()}
    snapshot = laid(cache, "you/halves", files, shared=True)
    source = resolve(str(snapshot / "half"))
    assert source.config.model_type == "qwen2_moe"
    assert source.checkpoint.names()


def test_no_more_than_the_hubs_library_lays_is_followed(cache, moe_folder, tmp_path):
    """Neither another repository's blobs, nor what only looks like a cache."""
    files = contents(moe_folder)
    private = laid(cache, "me/private", files, shared=False)
    secret = (private / "tokenizer.json").resolve()
    snapshot = laid(cache, "you/it", files, shared=True)
    blob = snapshot.parent.parent / "blobs" / "evil"
    (cache / "blobs" / "se").mkdir()
    shutil.copyfile(secret, cache / "blobs" / "se" / "secret")
    shutil.copyfile(secret, cache / "blobs" / "secret")
    targets = [secret, cache / "blobs" / "se" / "secret", cache / "blobs" / "secret"]
    for target in (*targets, tmp_path / "nothing"):
        blob.symlink_to(target)
        (snapshot / "tokenizer.json").unlink()
        (snapshot / "tokenizer.json").symlink_to(f"../../blobs/{blob.name}")
        with pytest.raises(MoesaicError, match=r"tokenizer\.json is a link out of its folder"):
            _ = resolve(str(snapshot)).config
        blob.unlink()
    home = tmp_path / "home"
    (home / "blobs").mkdir(parents=True)
    shutil.copyfile(secret, home / "blobs" / "secret")
    theirs = home / "snapshots" / "theirs"
    shutil.copytree(moe_folder, theirs)
    (theirs / "tokenizer.json").unlink()
    (theirs / "tokenizer.json").symlink_to("../../blobs/secret")
    with pytest.raises(MoesaicError, match=r"tokenizer\.json is a link out of its folder"):
        _ = resolve(str(theirs)).config


# --- what is fetched -----------------------------------------------------------------------------


@pytest.fixture
def asked(hub, monkeypatch):
    """The files that were fetched whole from the stand-in of the hub."""
    said = []
    get = Hub.do_GET

    def noted(self):
        _, found, file = self.path.partition(f"/resolve/{COMMIT}/")
        if found and self.command == "GET" and "Range" not in self.headers:
            said.append(file)
        get(self)

    monkeypatch.setattr(Hub, "do_GET", noted)
    return said


STRAY = {
    "original/model.safetensors": b"x" * 9000,
    "original/params.json": b"{}",
    "consolidated.safetensors": b"x" * 9000,
    "model.fp16.safetensors": b"x" * 9000,
    "pytorch_model.bin": b"x" * 9000,
    "pytorch_model.bin.index.json": b"{ }",
    "onnx/model.onnx": b"x" * 9000,
    "model-q4.gguf": b"x" * 9000,
    "LICENSE": b"free",
    "README.md": b"hello",
    "chat_template.json": b"[]",
    TEMPLATE: b"{{ tools }}",
    "tokenization_it.py": b"1 / 0",
}


@pytest.mark.parametrize("single", [False, True])
def test_only_the_files_of_the_index_are_fetched(hub, asked, moe_folder, tmp_path, single):
    """The dry run fetches no weights at all; where one file has all, no other is fetched."""
    whole = tmp_path / "whole"
    resolve(str(moe_folder)).load().save_pretrained(whole)
    files = contents(moe_folder)
    if single:  # a stray index beside one file: transformers reads the file
        files["model.safetensors"] = (whole / "model.safetensors").read_bytes()
    hub["you/it"] = files | STRAY
    shards = {n for n in files if n.endswith(".safetensors")}
    wanted = {"model.safetensors"} if single else shards
    (tmp_path / "dry").mkdir()
    dry = headers_of_model("you/it", tmp_path / "dry")
    assert sorted(dry.checkpoint.names()) == sorted(resolve(str(moe_folder)).checkpoint.names())
    assert not any(file.endswith(".safetensors") for file in asked)
    source = resolve("you/it")
    large = {file for file in asked if len(hub["you/it"][file]) >= 9000}
    named = {file for file in asked if "safetensors" in file}
    assert named - {"model.safetensors.index.json"} == wanted
    assert large <= wanted | {"tokenizer.json"}
    assert {"LICENSE", TEMPLATE, "chat_template.json"} <= {*asked}
    assert not {"original/params.json", "tokenization_it.py", "README.md"} & {*asked}
    assert source.fingerprint == resolve(str(moe_folder)).fingerprint
    assert len(asked) == len({*asked})
    before = len(asked)
    (tmp_path / "again").mkdir()
    assert headers_of_model("you/it", tmp_path / "again").folder == source.folder
    assert resolve("you/it").folder == source.folder
    assert len(asked) == before


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["config.json", "pytorch_model.bin"], "holds pickled weights only"),
        (["config.json", "pytorch_model.bin.index.json", "tf.h5"], "holds pickled weights only"),
        (["config.json", "model.fp16.safetensors"], "variants only, such as model.fp16"),
        (["adapter_config.json", "adapter_model.safetensors"], "holds an adapter"),
        (["config.json", "adapter_config.json", "model.safetensors"], "holds an adapter"),
        (["README.md", "it-q4_k_m.gguf"], "holds GGUF files: give one of them, such as it-q4"),
        (["params.json", "consolidated.safetensors"], r"holds consolidated\.safetensors, but no"),
        (["config.json", "model-00001-of-00002.safetensors"], r"but no model\.safetensors or"),
        (["config.json", "tf_model.h5"], r"holds tf_model\.h5, but no"),
        (["config.json"], r"No model\.safetensors or"),
        (["model.safetensors"], r"has no config\.json"),
    ],
)
def test_a_repository_that_is_no_model_is_refused_before_anything_large_is_fetched(
    hub, asked, files, words
):
    hub["you/it"] = dict.fromkeys(files, b"{}")
    with pytest.raises(MoesaicError, match=f"you/it.*{words}|{words}.*you/it"):
        resolve("you/it")
    assert {*asked} <= {"config.json", "pytorch_model.bin.index.json", "adapter_config.json"}


def test_a_branch_that_moves_is_read_at_one_commit(hub, moe_folder, monkeypatch):
    """Or a run would measure one commit and convert another."""
    hub["you/it"], revisions = contents(moe_folder), []
    model_info = HfApi.model_info

    def noted(self, name, *, revision=None, **options):
        revisions.append(revision)
        return model_info(self, name, revision=revision, **options)

    monkeypatch.setattr(HfApi, "model_info", noted)
    resolve("you/it")
    assert revisions.pop(0) is None
    revisions.clear()
    resolve("you/it")
    assert {*revisions} == {COMMIT}


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "not yours.*If it is private or gated, ask for access"),
        (403, "not yours.*give a token: hf auth login"),
        (429, "not yours.*Check the name and the connection"),
    ],
)
def test_the_hubs_own_reason_is_said(status, words, hub, moe_folder, monkeypatch):
    monkeypatch.setattr(Hub, "do_GET", lambda self: self.say({"error": "not yours"}, status))
    with pytest.raises(MoesaicError, match=words):
        resolve("you/it")


def test_what_transformers_fetched_is_used_without_a_connection(
    hub, asked, moe_folder, done, refused, tmp_path, monkeypatch
):
    """It fetches no licence, and the library calls a snapshot without one incomplete."""
    hub["you/it"] = contents(moe_folder) | STRAY
    snapshot_download("you/it", allow_patterns=["*.json", "model-*.safetensors"])
    hub["you/part"] = contents(moe_folder)
    snapshot_download("you/part", allow_patterns=["*.json", "model-00001-*.safetensors"])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve("you/it").checkpoint.names()
    dry = ("prune", "you/it", tmp_path / "out", "--keep", 6, "--dry-run")
    done(*dry)
    for line in (("inspect", "you/part"), ("prune", "you/part", *dry[2:])):
        refused("not whole in the hub's cache", *line)
    assert all(file.startswith("cache/") for file in inside(tmp_path))


def test_weights_of_another_name_are_those_that_transformers_reads(moe_folder, tmp_path):
    theirs = Path(shutil.copytree(moe_folder, tmp_path / "theirs"))
    names = resolve(str(theirs)).checkpoint.names()
    (theirs / "model.safetensors.index.json").rename(theirs / "own.safetensors.index.json")
    edited(theirs / "config.json", transformers_weights="own.safetensors.index.json")
    assert resolve(str(theirs)).checkpoint.names() == names
    edited(theirs / "config.json", transformers_weights="../other.safetensors")
    with pytest.raises(MoesaicError, match="transformers_weights"):
        resolve(str(theirs)).checkpoint  # noqa: B018
