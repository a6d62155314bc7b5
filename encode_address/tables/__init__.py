"""`encode-address paper`: the tables of the paper from result tables, each as CSV, Markdown and LaTeX.

A table is a function of models that gives a `Table`: `main` has those with all models in one, `appendix` those of which every model
has its own. Every figure is an estimate of the experiments' own functions, with n and its 95 % interval. What was not run is an en
dash; a column that cannot apply to a row is empty. Nothing is filled in from published values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from encode_address.tables.appendix import APPENDIX
from encode_address.tables.main import MAIN
from encode_address.tables.results import Results
from encode_address.tables.table import SUFFIXES, Table

__all__ = ["Results", "Table", "tables_of", "write"]


def tables_of(models: Sequence[Results]) -> list[Table]:
    """The main tables, and of each model those appendix tables of which something was run ("NAME-MODEL")."""
    own = [(model.name.replace("/", "--"), make([model])) for make in APPENDIX for model in models]
    appendix = [replace(table, name=f"{table.name}-{slug}") for slug, table in own if table.known]
    return [make(models) for make in MAIN] + appendix


def write(models: Sequence[Results], folder: Path) -> list[Path]:
    """Write the tables of these models into a folder, in place of those that are there; returns the files.

    Raises EncodeAddressError for rows that mix draws of pairs (see `Results`), StoreError where a file cannot be written.
    """
    folder = Path(folder)
    tables = tables_of(models)
    for stale in (
        path for make in APPENDIX for suffix in SUFFIXES for path in folder.glob(f"{make([]).name}-*{suffix}")
    ):
        stale.unlink(missing_ok=True)  # an earlier run may have had rows, or models, that are not there now
    return [path for table in tables for path in table.write(folder)]
