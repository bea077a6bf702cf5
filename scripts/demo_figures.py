"""Say in one sentence what `make demo` measured: a file of `fit` beside quantising alone.

python scripts/demo_figures.py moesaic-demo
"""

import json
import sys
from pathlib import Path


def main(folder: Path) -> None:
    """``folder`` has two files, and beside them what ``moesaic eval --json`` says of each."""
    files = {"quantised": folder / "quantised.gguf", "fit": next(folder.glob("fit/moesaic/*.gguf"))}
    said = {
        name: json.loads((folder / f"{file.name}.json").read_text("utf-8"))
        for name, file in files.items()
    }
    megabytes = {name: f"{file.stat().st_size / 1e6:.2f} MB" for name, file in files.items()}
    perplexity = {name: f"{figures['perplexity']:.1f}" for name, figures in said.items()}
    kl = {name: f"{figures['kl']:.2f}" for name, figures in said.items()}
    print(
        f"tiny-moe, whose perplexity is {said['fit']['against']['perplexity']:.1f}: quantising "
        f"alone makes {megabytes['quantised']} of it, at perplexity {perplexity['quantised']} and "
        f"a KL of {kl['quantised']}; moesaic fit makes {megabytes['fit']}, at {perplexity['fit']} "
        f"and {kl['fit']}."
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
