"""A table of estimates, and its three files: CSV with every figure, Markdown and LaTeX to read and to print."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from encode_address.run.store import write_text
from encode_address.stats import Estimate
from encode_address.tables.results import Results

Cell = Estimate | str | None  # None: not run; "": nothing that could have been run
Line = tuple[tuple[str, ...], Mapping[str, Cell]]  # what a row is about; its cells by column
DASH = "\N{EN DASH}"
SUFFIXES = (".csv", ".md", ".tex")
ESCAPES = str.maketrans({
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$", "|": "$|$", DASH: "--", "→": r"$\rightarrow$",
    "∞": r"$\infty$",
})  # fmt: skip


@dataclass(frozen=True)
class Table:
    """`keys` name what a row is about (the first is the model), `columns` what was measured; rows hold one value for each."""

    name: str
    caption: str
    keys: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[tuple[str, ...], tuple[Cell, ...]], ...]

    @property
    def known(self) -> bool:
        """Whether anything in it was run."""
        return any(_known(cell) for _, cells in self.rows for cell in cells)

    @property
    def said(self) -> str:
        """The caption, with what holds for all cells: the model, if there is one, and the pairs."""
        models, sizes = self._models, {cell.n for _, cells in self.rows for cell in cells if isinstance(cell, Estimate)}
        about = f" Model: {models[0]}." if len(models) == 1 else ""
        if not self.known:
            return f"{self.caption}{about} Not run."
        sizes -= {0}
        least, most = (min(sizes), max(sizes)) if sizes else (0, 0)
        n = f"{least} in every cell" if least == most else f"{least} to {most}, by cell in the CSV file"
        return f"{self.caption}{about}" + (f" Brackets: 95 % intervals; n = {n}. {DASH}: not run." if sizes else "")

    def tidy(self) -> pd.DataFrame:
        """One row per cell: the keys, `column`, and `value`, `low`, `high`, `n` of an estimate or the `text` of anything else."""
        out = []
        for labels, cells in self.rows:
            for column, cell in zip(self.columns, cells):
                if cell == "":
                    continue
                line = {**dict(zip(self.keys, labels)), "column": column}
                if isinstance(cell, Estimate) and _known(cell):
                    line |= cell.as_dict()
                out.append(line | ({"text": plain(cell)} if "value" not in line else {}))
        return pd.DataFrame(out, columns=[*self.keys, "column", "value", "low", "high", "n", "text"]).astype(
            {"n": "Int64"}
        )

    def markdown(self) -> str:
        head, *lines = [[text.replace("|", r"\|") for text in line] for line in self._lines(plain)]
        body = [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines)]
        return "\n".join([f"**{self.name}.** {self.said}", "", *body]) + "\n"

    def latex(self) -> str:
        """A `table` environment; a table that is too wide or too high for the page is made smaller."""
        head, *lines = self._lines(typeset)
        labels, body = len(head) - len(self.columns), []
        for before, line in zip([None, *lines], lines):
            apart = labels > 1 and before is not None and before[0] != line[0]
            body += [r"\midrule"] * apart + [" & ".join(line) + r" \\"]
        label = re.sub(r"[^\w.:+-]", "-", self.name)  # no character that is special in a file of references
        return "\n".join([
            r"% needs \usepackage{booktabs,adjustbox}", r"\begin{table}[t]", r"\centering", r"\footnotesize",
            rf"\caption{{{escaped(self.said)}}}", rf"\label{{tab:{label}}}",
            r"\begin{adjustbox}{max width=\linewidth, max totalheight=0.85\textheight}",
            rf"\begin{{tabular}}{{{'l' * labels}{'r' * len(self.columns)}}}", r"\toprule", " & ".join(head) + r" \\", r"\midrule",
            *body, r"\bottomrule", r"\end{tabular}", r"\end{adjustbox}", r"\end{table}",
        ]) + "\n"  # fmt: skip

    def write(self, folder: Path) -> list[Path]:
        """Write NAME.csv, NAME.md and NAME.tex, each whole or not at all. Raises StoreError."""
        texts = (self.tidy().to_csv(index=False, float_format="%.6g"), self.markdown(), self.latex())
        paths = [folder / f"{self.name}{suffix}" for suffix in SUFFIXES]
        for path, text in zip(paths, texts):
            write_text(path, text)
        return paths

    @property
    def _models(self) -> list[str]:
        return list(dict.fromkeys(labels[0] for labels, _ in self.rows))

    def _lines(self, form: Callable[[Cell], str]) -> list[list[str]]:
        """The head and every row as text; of a single model the caption speaks, and no column."""
        first = 1 if len(self._models) == 1 and len(self.keys) > 1 else 0
        whole = [(self.keys, self.columns), *self.rows]
        return [[form(cell) for cell in (*labels[first:], *cells)] for labels, cells in whole]


def build(
    name: str,
    caption: str,
    keys: Sequence[str],
    columns: Sequence[str],
    models: Iterable[Results],
    lines: Callable[[Results], Iterable[Line]],
) -> Table:
    """The table of what `lines` gives for each model; `keys` are those beside the model. A column that a line lacks cannot apply
    to it, and goes if it applies to none; a model without any line has not run what is asked."""
    rows = []
    for model in models:
        found = list(lines(model)) or [((DASH,) * len(keys), dict.fromkeys(columns))]
        rows += [((model.name, *labels), cells) for labels, cells in found]
    used = tuple(column for column in columns if not rows or any(cells.get(column, "") != "" for _, cells in rows))
    filled = tuple((labels, tuple(cells.get(column, "") for column in used)) for labels, cells in rows)
    return Table(name, caption, ("model", *keys), used, filled)


def plain(cell: Cell) -> str:
    """A cell in Markdown: "0.87 [0.80, 0.92]"."""
    if isinstance(cell, Estimate):
        return f"{number(cell.value)} [{number(cell.low)}, {number(cell.high)}]" if _known(cell) else DASH
    return DASH if cell is None else cell


def typeset(cell: Cell) -> str:
    """A cell in LaTeX."""
    if isinstance(cell, Estimate) and _known(cell):
        return plain(cell).replace("-", "$-$").replace("∞", r"$\infty$")
    return escaped(plain(cell))


def escaped(text: str) -> str:
    """Text with LaTeX's special characters escaped."""
    return text.translate(ESCAPES)


def number(value: float) -> str:
    """Two decimals, or none from 100 on (perplexities); no "-0.00"."""
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    text = f"{value:.2f}" if abs(value) < 100 else f"{value:,.0f}"
    return text.removeprefix("-") if not text.strip("-0.") else text


def _known(cell: Cell) -> bool:
    """Whether a cell says something: an estimate of at least one pair, or words."""
    return cell.n > 0 and not math.isnan(cell.value) if isinstance(cell, Estimate) else bool(cell) and cell != DASH
