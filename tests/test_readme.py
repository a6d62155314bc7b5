"""The README's Python runs as it stands, and its output is what the commands print."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_python_blocks_run(tmp_path):
    """The second goes on where the first ends."""
    first, second = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    small = first.replace("n=100", "n=4").replace("ea.find(model)", "ea.find(model, ['chat8'], n=6)")
    assert small.count("n=4") == small.count("n=6") == 1
    planned = re.search(r"print\(engine.plan\(cells\)\)  # (.*)", second)[1]
    small = f"{small}\nprint('found', len(table), found.folder)\n{second}"
    result = subprocess.run(
        [sys.executable, "-c", f"import torch; torch.set_num_threads(1)\n{small}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert sum(line.startswith("  ok ") for line in lines) == 8
    end = next(i for i, line in enumerate(lines) if line.startswith("found"))
    assert lines[end - 1] == "nylon"
    assert lines[end].endswith("results/tiny-gdn")
    assert lines[end + 1] == planned
    assert len(lines[end + 2 :]) == 5  # the redirected share of each of three blocks, and pandas' own two lines


def test_the_dry_run_is_as_printed(tmp_path):
    said = re.search(r"\$ encode-address (find .*--dry-run)\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    command = [sys.executable, "-m", "encode_address.cli", *said[1].split(), "--out", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stdout) == (0, said[2])
    assert list(tmp_path.iterdir()) == []
