"""Writes arithmetic for skills.yaml: DIR/arithmetic.txt to read, DIR/arithmetic.jsonl to answer.

    python benchmarks/arithmetic.py DIR

Half are sums of two numbers from 1 to 20, half the differences that undo such a sum. Of four
choices the wrong ones differ from the right one by 1, 2 or 10.
"""

import json
import random
import sys
from pathlib import Path

LINES, QUESTIONS = 4000, 200


def main() -> None:
    folder, draw = Path(sys.argv[1]), random.Random(0)

    def problem() -> tuple[str, int]:
        a, b = draw.choices(range(1, 21), k=2)
        return (f"{a} + {b}", a + b) if draw.random() < 0.5 else (f"{a + b} - {a}", b)

    lines = [f"{words} = {value}" for words, value in (problem() for _ in range(LINES))]
    (folder / "arithmetic.txt").write_text("\n".join(lines) + "\n", "utf-8")
    with (folder / "arithmetic.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(QUESTIONS):
            words, value = problem()
            wrong = [x for d in (1, 2, 10) for x in (value - d, value + d) if x >= 0]
            choices = [str(x) for x in draw.sample([value, *draw.sample(wrong, 3)], 4)]
            answer = choices.index(str(value))
            question = {"question": f"{words} =", "choices": choices, "answer": answer}
            file.write(json.dumps(question) + "\n")


if __name__ == "__main__":
    main()
