"""Results pushed to a stand-in of the hub's HTTP interface; plans applied."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from builders import equal, inside, weights
from click.testing import CliRunner
from huggingface_hub import constants

import moesaic
from moesaic.cli import app
from moesaic.errors import MoesaicError
from moesaic.plan import Plan
from moesaic.record import Record

TOKEN, COMMIT = "hf_standin", "0" * 40


class Hub(BaseHTTPRequestHandler):
    """What uploading and fetching ask of the hub; all files are small ones to it."""

    repos: dict[str, dict[str, bytes]]

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, code: int, body: bytes, **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def say(self, said: Any, code: int = 200) -> None:
        self.answer(code, json.dumps(said).encode(), Content_Type="application/json")

    def do_POST(self) -> None:
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
            files = json.loads(given)["files"]
            each = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files
            ]
            self.say({"files": each})
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

    def do_GET(self) -> None:
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
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, dict[str, bytes]]]:
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


def run(*words: str) -> Any:
    return CliRunner().invoke(app, [*words])


def done(*words: str) -> Any:
    result = run(*words, "--json")
    assert result.exit_code == 0, (result.stderr, result.exception)
    return json.loads(result.stdout)


TEXT = ("--samples", "4", "--length", "32", "--no-eval")
PRUNE = ("prune", "tiny-moe", "--keep", "6", "--score", "random", *TEXT)


STEPS = """
model: tiny-moe
out: {out}
dtype: float32
calibration: {{samples: 4, length: 32}}
evaluation: null
steps:
- prune: {{keep: 6, refit: true}}
- slim: {{keep: 0.5}}
- skip: {{}}
"""


def test_a_plan_rebuilds_all_steps(tmp_path: Path) -> None:
    """Also in another type than the base's, from the base and from a result between."""
    out, again, between = tmp_path / "out", tmp_path / "again", tmp_path / "between"
    (tmp_path / "recipe.yaml").write_text(STEPS.format(out=out))
    done("run", str(tmp_path / "recipe.yaml"))
    assert len(Plan.load(out).earlier) == 2
    done("apply", str(out), str(again))
    for name in inside(again) - {"moesaic/files.json"}:
        assert (again / name).read_bytes() == (out / name).read_bytes(), name
    first, *_ = Plan.load(out).earlier
    between.mkdir()
    first.save(between)
    done("apply", str(between), str(tmp_path / "first"))
    moesaic.apply(str(tmp_path / "first"), out, again, overwrite=True)
    assert equal(weights(out), weights(again))
    said = run("apply", "tiny-shared-moe", str(out), str(tmp_path / "never"))
    assert "was made for a mixtral" in str(said.exception)


def test_a_result_is_pushed_whole(hub: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    out = tmp_path / "out"
    verb, model, *options = PRUNE
    done(verb, model, str(out), *options)
    shards = ("model-00001-of-00002.safetensors", "model.safetensors.index.json")
    hub["me/whole"] = dict.fromkeys([*shards, "notes.md"], b"of an earlier result")
    assert moesaic.push(out, "whole").endswith("/me/whole")
    files = hub["me/whole"]
    assert files.keys() == {*inside(out), "notes.md"}
    assert files["model.safetensors"] == (out / "model.safetensors").read_bytes()
    assert "from_pretrained('me/whole')" in files["README.md"].decode()
    with pytest.raises(MoesaicError, match="is not a result of ours"):
        moesaic.push(tmp_path, "me/nothing")
    assert "me/nothing" not in hub


@pytest.mark.parametrize(
    ("words", "change", "message"),
    [
        (["--push", "a/b/c"], {}, "no repository such as"),
        (["--push", "me/it"], {"token": None}, "hf auth login"),
        (["--push", "me/it"], {"offline": True}, "HF_HUB_OFFLINE"),
    ],
)
def test_what_cannot_be_pushed_is_said_first(
    words: list[str], change: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is computed or written."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", "offline" in change)
    if "token" in change:
        monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    verb, model, *options = PRUNE
    result = run(verb, model, str(tmp_path / "out"), *options, *words)
    assert isinstance(result.exception, MoesaicError)
    assert message in str(result.exception)
    assert not [*tmp_path.iterdir()]


def test_a_file_alone_is_not_pushed(
    hub: dict[str, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that ends without a step leaves no result that has a card."""
    record = Record("tiny-moe", "out", "mixtral", True, [], [], measured={"tried": []})
    monkeypatch.setattr("moesaic.fitting.run.search_and_make", lambda *_, **__: record)
    result = run("fit", "tiny-moe", str(tmp_path / "out"), "--memory", "9MB", "--push", "me/x")
    assert result.exit_code == 0, result.exception
    assert "Not pushed" in result.stderr
    assert not hub


def test_a_push_that_is_refused_leaves_the_result(
    hub: dict[str, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    verb, model, *options = PRUNE
    out = tmp_path / "out"
    result = run(verb, model, str(out), *options, "--push", "me/it")
    assert isinstance(result.exception, MoesaicError)
    assert "failed" in str(result.exception)
    assert f"The result is in {out}" in str(result.exception)
    assert (out / "model.safetensors").exists()
