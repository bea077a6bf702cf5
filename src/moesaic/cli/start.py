"""The start of a command: what libraries import and keep, less what is not needed.

A dry run looks at shapes, so that most of its time is importing. Whatever is left out here is a
matter of time alone: where it is missed, the command is carried out again with everything.
"""

from __future__ import annotations

import gc
import marshal
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import wrapt

from moesaic.errors import MoesaicError
from moesaic.io.names import cache_folder
from moesaic.io.outputs import whole_file

UNASKED = ("scipy", "sklearn", "torchao")
"""Libraries that transformers imports with its models because they are installed, for losses of
object detection and for a quantiser that no command uses: half a second of each start. Older ones
import sklearn, too, which needs scipy."""

UNRUN = (
    *("torch._dynamo", "torch.nn.attention.flex_attention", "torch.distributed.tensor"),
    *("torch.distributed.fsdp", "torch.distributed.checkpoint"),
    *("torch.distributed._functional_collectives", "accelerate"),
    *("torch.fx.experimental.symbolic_shapes", "sympy"),
)
"""Modules that transformers' models name, for compiling and for several processes, and torch's
shapes without values, for unknown sizes. They do nothing while a model has no values and its sizes
are known: a second and a half of each start."""

PLAIN: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("guard_or_false", "guard_or_true", "expect_true"), bool),
    "statically_known_true": bool,
    "is_nested_int": lambda size: False,
    "sym_and": lambda *said: all(said),
    "sym_or": lambda *said: any(said),
    "sym_eq": lambda a, b: list(a) == list(b) if isinstance(a, Sequence) else a == b,
}
"""By name, what torch's functions of sizes are for plain numbers."""

REMEMBERED = {"LRU_CACHE_CAPACITY": "512", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "512"}
"""Compiled products that torch and oneDNN remember, by their shapes, each half a megabyte: experts
of a mixture meet new numbers of tokens in each batch. The default is 1,024; prompts of a small
mixture take a third longer with 256, and as long with 512."""

WHOLE = "MOESAIC_WHOLE"
"""Set where a command is carried out again with all modules."""


def remember_less() -> None:
    """Bound what is remembered of products' shapes, unless the user did."""
    for name, most in REMEMBERED.items():
        os.environ.setdefault(name, most)


def start_quickly() -> None:
    """Let transformers import its models without libraries that they do not need.

    Nor is garbage looked for meanwhile: what importing makes is there to stay.
    """
    models = "transformers.modeling_utils"
    if models in sys.modules:
        return
    hidden = [name for name in UNASKED if name not in sys.modules]
    for name in hidden:  # by which Python refuses to import it
        sys.modules[name] = None  # type: ignore[assignment]
    gc.disable()

    @wrapt.when_imported(models)
    def started(_: ModuleType) -> None:
        for name in hidden:
            if sys.modules.get(name, sys) is None:
                del sys.modules[name]
        gc.freeze()
        gc.enable()

    wrapt.when_imported("transformers.utils.import_utils")(_remember_names)


# --- names of transformers -----------------------------------------------------------------------


def _remember_names(module: ModuleType) -> None:
    """Keep the names that transformers reads from its models' text, twice at each start.

    Only of an installed release: somebody's own copy may change from one start to the next.
    """
    read = getattr(module, "create_import_structure_from_path", None)
    root = Path(str(module.__file__)).parents[1]
    if read is None or root.parent.name not in ("site-packages", "dist-packages"):
        return

    def remembered(path: str | Path) -> Any:
        folder = Path(path)
        folder = folder.parent if folder.name == "__init__.py" else folder
        return kept(root, lambda: read(path)) if folder == root / "models" else read(path)

    vars(module)["create_import_structure_from_path"] = remembered


def kept(root: Path, read: Callable[[], Any]) -> Any:
    """What was read of an installed library, from a file beside other caches.

    Args:
        root: the library's folder, in which nothing may have been installed since.
        read: reads it anew.
    """
    file = cache_folder() / f"{root.name}.names"
    folders = sorted((f.name, f.stat().st_mtime_ns) for f in os.scandir(root / "models"))
    state = [sys.version, str(root), folders]
    try:
        key, found = marshal.loads(file.read_bytes())
        if key == state:
            return found
    except (OSError, ValueError, EOFError, TypeError):
        pass
    found = read()
    try:
        with whole_file(file) as partial:
            partial.write_bytes(marshal.dumps((state, found)))
    except (OSError, ValueError):
        pass  # nowhere to keep it, or nothing that can be kept
    return found


# --- dry runs ------------------------------------------------------------------------------------


class Missed(Exception):
    """A stand-in was used as only the real thing can be."""


class Named:
    """Stands for a class, which may be derived from and made; nothing else is an instance of it."""

    def __init__(self, *given: Any, **named: Any) -> None: ...


class Outlined(MetaPathFinder, Loader):
    """Finds modules that have every name, and nothing behind it."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.used = False
        self.missed = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not any(name == known or name.startswith(f"{known}.") for known in self.names):
            return None
        return ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        self.used = True

        def made(name: str) -> Any:
            """A class where the name begins like one, otherwise a function that can decorate."""
            if name.startswith("__"):
                raise AttributeError(name)
            if name in PLAIN:
                return PLAIN[name]

            def function(*given: Any, **named: Any) -> Any:
                if given and callable(given[0]):
                    return given[0]
                if given and given[0] is None:  # a decorator with options
                    return function
                self.missed = True
                raise Missed(f"{module.__name__}.{name} was left out of a dry run")

            found = type(name, (Named,), {}) if name.lstrip("_")[:1].isupper() else function
            setattr(module, name, found)
            return found

        vars(module)["__getattr__"] = made


@contextmanager
def outlined(dry_run: bool) -> Iterator[None]:
    """Inside, what a model without values never runs is not imported.

    Where that fails, for other libraries may ask more of those modules, the command is carried out
    again with all of them.

    Args:
        dry_run: what is inside computes nothing.
    """
    if not dry_run or "torch" in sys.modules or WHOLE in os.environ:
        yield
        return
    finder = Outlined(UNRUN)
    sys.meta_path.insert(0, finder)
    try:
        yield
    except Exception as error:
        if finder.missed or (finder.used and not refused(error)):
            command = [sys.executable, *sys.orig_argv[1:]]
            whole = {**os.environ, WHOLE: "1"}
            raise SystemExit(subprocess.run(command, env=whole, check=False).returncode) from None
        raise
    finally:
        sys.meta_path.remove(finder)


def refused(error: BaseException | None) -> bool:
    """Whether an error tells of a request that cannot be met, and nothing else is behind it."""
    while isinstance(error, MoesaicError):
        error = error.__cause__ or error.__context__
    return error is None
