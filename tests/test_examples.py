"""The examples run as a reader would run them, and show what they say they show."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import encode_address as ea

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: str) -> str:
    # One thread: the models are small, and threads that wait for one another are slow on a busy machine.
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, EXAMPLES / name, *arguments], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("model", ["tiny-gdn", "tiny-mamba2"])
def test_quickstart_shows_one_block_move_the_address(model):
    out = run("quickstart.py", model)
    facts = next(line for line in out.splitlines() if line.startswith("answer:"))
    answer, right, other = (part.split(": ")[1] for part in facts.replace("; ", ", ").split(", "))
    assert answer == right != other
    rows = [line.split() for line in out.split("transplanted")[1].strip().splitlines()]
    answers = {block: transplanted for block, _removed, transplanted, *_ in rows}
    assert list(answers) == [block.name for block in ea.load(model).layout.blocks]
    (address,) = [block for block, said in answers.items() if said == other]
    assert [row[0] for row in rows if "<-" in row] == [address]
    assert all(said == right for block, said in answers.items() if block != address)
    assert rows[0][1] != right, "nothing works without the first block"


def test_my_first_intervention_is_felt_after_its_block_only():
    out = run("my_first_intervention.py")
    lines = [line.split() for line in out.splitlines() if line]
    right = lines[0][2].rstrip(";")
    header, rows = lines[2], {" ".join(line[:-5]): line[-5:] for line in lines[3:]}
    assert header[-3:] == ["L1", "L3", "L7"]
    answer, lead, *attention = rows["none"]
    assert answer == right
    assert float(lead) > 0
    for edit, (_, _, first, second, _third) in rows.items():
        if edit.startswith("G2"):
            assert [first, second] == attention[:2], "layers before the block have run already"
    assert rows["G2 x -1"][0] != right
    assert float(rows["G2 x -1"][-1]) < 0.5 < float(attention[-1])
    assert rows["G0 x 0.5"][1:] != rows["none"][1:], "the edit lands"


@pytest.mark.parametrize(("donor", "host"), [("tiny-gdn", "tiny-mamba2"), ("tiny-mamba2", "tiny-gdn")])
def test_what_replacement_misses_is_the_final_position(donor, host):
    out = run("what_replacement_misses.py", "--donor", donor, "--host", host, "--n", "12")
    maps, table = out.split("\n\n")
    r2 = {name: float(rest.split()[0]) for line in maps.splitlines()[:-1] for name, rest in [line.split(" map ")]}
    assert r2[f"{host}: R2 of entry"] > 0.999, "the host's own residual stream maps onto itself"
    assert r2[f"{donor}: R2 of exit"] > 0.7, "the map that fails is a good one by this measure"
    share = float(maps.splitlines()[-1].split(" %")[0])
    assert 0 < share < 0.5
    # Each row: accuracy [low, high] and the share missed at the final position [low, high].
    rows = [(line[:55].strip(), line[55:].replace("[", "").replace("]", "").split()) for line in table.splitlines()[1:]]
    names, numbers = [name for name, _ in rows], [[float(cell.rstrip(",")) for cell in cells] for _, cells in rows]
    accuracy, missed = [row[0] for row in numbers], [row[3] for row in numbers]
    own, nothing, refitted, whole, final_exact, rest_exact, linear, alike, still, alike_linear = range(10)
    assert len(rows) == 13
    assert [names[i] for i in (own, nothing, linear)] == ["host's own Address", "nothing", "linear map"]
    assert all(low <= value <= high for row in numbers for value, low, high in (row[:3], row[3:]))
    assert accuracy[own] == accuracy[refitted] == 1 > accuracy[nothing]
    assert missed[own] == missed[refitted] == missed[final_exact] == 0
    assert missed[whole] == missed[rest_exact] > 1 > missed[alike]
    assert accuracy[final_exact] > max(accuracy[whole], accuracy[rest_exact]) + 0.3
    assert accuracy[alike] > accuracy[whole]
    assert missed[still] < missed[whole]
    assert missed[alike_linear] < missed[linear]
    foreign, line, constant = numbers[-3:]
    assert min(foreign[0], line[0]) > constant[0]
    assert line[3] < foreign[3] < constant[3], "the address is read off the host's own stream by a linear map"
