"""Print the oldest libraries that pyproject.toml allows, as constraints for pip.

python scripts/oldest.py > oldest.txt && pip install -c oldest.txt -e ".[dev]"
"""

from __future__ import annotations

import re
from pathlib import Path

project = (Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8")
bounds = re.findall(r'^ +"([\w-]+)(?:\[\w+\])?>=([\d.]+)', project, re.MULTILINE)
for name, oldest in dict(bounds).items():
    print(f"{name}=={oldest}")
