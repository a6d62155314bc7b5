"""The README's Python runs as it stands, and its output is what the commands print."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_python_block_runs(tmp_path):
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    small = code.replace("n=100", "n=4").replace("ea.find(model)", "ea.find(model, ['chat8'], n=6)")
    assert small.count("n=4") == small.count("n=6") == 1
    result = subprocess.run(
        [sys.executable, "-c", f"import torch; torch.set_num_threads(1)\n{small}\nprint(len(table), found.folder)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert sum(line.startswith("  ok ") for line in lines) == 8
    assert lines[-2] == "amber"
    assert lines[-1].endswith("results/tiny-gdn")
