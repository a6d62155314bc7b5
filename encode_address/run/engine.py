"""Run cells on a local model: group, trace, and turn what was read into rows.

Two paths. *full*: one forward over whole prompts, many rows per trace. *final*: edits at the last position only;
the prefixes run once, and every cell is one token that continues from a copy of its host's cache. Baseline
(`none`) cells exist on both, so that a patched row is compared with one that took the same path.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import nnsight
import pandas as pd
import torch
import transformers

from encode_address import measure
from encode_address.errors import RunError
from encode_address.interventions import capture, mixer_output, read_cache, write_cache
from encode_address.run.cells import FINAL, FULL, Cell, bundles, slices
from encode_address.run.edits import (
    apply_edits,
    donor_stands,
    head_stands,
    projected_input,
    value_stands,
    write_donor,
    write_head,
    write_value,
)
from encode_address.run.store import Store
from encode_address.tasks.prompts import Prompt
from encode_address.tasks.text import Text

BATCH_TOKENS = 8192
SMALL = 5_000_000  # parameters of a model that runs best, on a CPU, with one thread
STEP_ROWS, STEP_BYTES = 512, 4 << 30  # of a one-token trace: rows, and bytes of their caches


class Engine:
    """Runs cells on one model; keeps the last captured donors and the text means.

    `text` is the source of mean removal. `on_rows` is called with the number of rows each trace finished.
    """

    def __init__(
        self,
        model: Any,
        text: Text | None = None,
        batch_tokens: int = BATCH_TOKENS,
        on_rows: Callable[[int], Any] | None = None,
    ) -> None:
        if model.remote:
            raise RunError("experiments run on local models in this version; a raw `model.trace` does run remotely")
        self.model, self.text, self.batch_tokens = model, text, batch_tokens
        self.on_rows = on_rows or (lambda n: None)
        self.tokens = 0  # forwarded so far
        self._means: dict[int, torch.Tensor] | None = None
        self._captured: tuple[Any, Any] = (None, None)

    def run(self, cells: Sequence[Cell], store: Store | None = None) -> pd.DataFrame:
        """The table of `cells`, one row per cell in their order; rows already in `store` are not run again."""
        if not cells:
            return pd.DataFrame()
        with _threads(self.model):
            return self._run(cells, store)

    def _run(self, cells: Sequence[Cell], store: Store | None) -> pd.DataFrame:
        facts = self.facts()
        keys = [cell.key(facts) for cell in cells]
        if len(set(keys)) != len(keys):
            raise RunError("two cells of one plan are the same; label them apart")
        done = store.keys() if store else set()
        twins: dict[str, list[tuple[str, Cell]]] = {}  # cells that differ in their labels only are run once
        for key, cell in zip(keys, cells):
            if key not in done:
                twins.setdefault(cell.work, []).append((key, cell))
        self.on_rows(len(cells) - sum(map(len, twins.values())))
        fresh: list[dict[str, Any]] = []
        for batch, path in self._batches([group[0][1] for group in twins.values()]):
            rows = [
                {"key": key, **twin.columns(), **measured, **facts}
                for cell, measured in zip(batch, path(batch))
                for key, twin in twins[cell.work]
            ]
            if store:
                store.append(rows)
            else:
                fresh.extend(rows)
            self.on_rows(len(rows))
        table = store.table(keys) if store else pd.DataFrame(fresh)
        return table.set_index("key").loc[keys].reset_index()

    def facts(self) -> dict[str, Any]:
        """The columns that are the same for every row of this model; with its cell they determine a row."""
        model = self.model
        return {
            "model": model.name,
            "fingerprint": model.fingerprint,
            "revision": model.revision or "",
            "dtype": model.dtype,
            "attn_implementation": model.attn_implementation,
            "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type,
            "where": "local",
            "text_source": self.text.name if self.text else "",
            "text_sha256": self.text.sha256 if self.text else "",
            "versions": " ".join(f"{name}={version}" for name, version in versions().items()),
        }

    # -- batches -----------------------------------------------------------------
    def _batches(self, cells: Sequence[Cell]):
        for batch in slices([c for c in cells if c.path == FULL], self.batch_tokens):
            yield batch, self._full
        for bundle in bundles([c for c in cells if c.path == FINAL], self.batch_tokens):
            yield bundle, self._final

    def _full(self, cells: list[Cell]) -> list[dict[str, Any]]:
        model, first = self.model, cells[0]
        layers, embed = model.layers, model.embed
        ids = _ids([cell.host for cell in cells])
        edits = self._full_edits(cells)
        watch = {layer: model.attention_op(layer) for layer in sorted({layer for layer, _ in first.watch})}
        entries = _entries([cell.host for cell in cells]) if watch else None
        self.tokens += ids.numel()
        if first.text:
            with torch.no_grad(), model.trace(ids) as tracer:
                seen = nnsight.save({})
                seen.update(apply_edits(layers, embed, edits, watch, entries))
                seen["loss"] = measure.next_token_loss(tracer.result.logits, ids)
            self._verify(cells, seen, torch.isfinite(seen["loss"]).all())
            return [{"loss": loss} for loss in seen["loss"].tolist()]
        tokens = _tokens(cells)
        with torch.no_grad(), model.trace(ids, logits_to_keep=1) as tracer:
            seen = nnsight.save({})
            seen.update(apply_edits(layers, embed, edits, watch, entries))
            seen["answer"] = measure.answer(tracer.result.logits[:, -1], tokens)
        self._verify(cells, seen, seen["answer"]["finite"].all())
        return self._rows(cells, seen)

    def _full_edits(self, cells: list[Cell]) -> dict[int, tuple]:
        first, edits = cells[0], {}
        where = torch.tensor([cell.where for cell in cells])
        hosts = self._capture(_ids([cell.host for cell in cells]), where) if first.mode == "random" else {}
        for layer in first.layers:
            if first.intervention == "remove":
                value = None if first.mode == "zero" else [self.means()[layer]]
                edits[layer] = (mixer_output, write_value, value_stands, (value,))
            elif first.intervention == "heads":
                edits[layer] = (projected_input, write_head, head_stands, (first.head, self.model.heads))
            elif first.intervention == "transplant":
                values = self._donors(cells)[layer]
                if hosts:
                    values = torch.stack([_noisy(c, layer, *v) for c, *v in zip(cells, hosts[layer], values)])
                edits[layer] = (mixer_output, write_donor, donor_stands, (values, where, None))
            else:
                raise RunError(f"no full path for the intervention {first.intervention!r}")
        return edits

    def _donors(self, cells: list[Cell]) -> dict[int, torch.Tensor]:
        """Every mixer's output, and the embeddings, at the donors' source positions: (batch, k, d_model) by layer."""
        ids, source = _ids([cell.donor for cell in cells]), torch.tensor([cell.source for cell in cells])
        if self._captured[0] != (ids.tolist(), source.tolist()):
            self._captured = ((ids.tolist(), source.tolist()), self._capture(ids, source))
        return self._captured[1]

    def _capture(self, ids: torch.Tensor, source: torch.Tensor) -> dict[int, torch.Tensor]:
        model, count = self.model, len(self.model.layout.kinds)
        layers, embed = model.layers, model.embed
        self.tokens += ids.numel()
        with torch.no_grad(), model.trace(ids, logits_to_keep=1) as tracer:
            seen = nnsight.save({})
            seen[-1] = capture(embed, source)
            for i in range(count):
                seen[i] = capture(layers[i].mixer, source)
            tracer.stop()
        return dict(seen)

    def _final(self, cells: list[Cell]) -> list[dict[str, Any]]:
        prompts = {p.ids: p for cell in cells for p in (cell.host, cell.donor) if p is not None}
        place = {ids: i for i, ids in enumerate(prompts)}
        ids = _ids(list(prompts.values()))
        model, everything = self.model, torch.arange(len(prompts))
        self.tokens += ids.numel()
        with torch.no_grad(), model.trace(ids[:, :-1], use_cache=True, logits_to_keep=1) as tracer:
            cache = tracer.result.cache.save()
        saved = read_cache(cache)
        outputs: dict[int, torch.Tensor] = {}
        touched = sorted({layer for cell in cells for layer in cell.layers})
        if touched:
            outputs = self._step(ids, everything, cache, saved, capture_at=touched)
        rows: list[dict[str, Any]] = []
        size = sum(t.numel() * t.element_size() for layer in saved for t in layer.values()) // len(prompts)
        step = min(STEP_ROWS, max(1, STEP_BYTES // size))
        for start in range(0, len(cells), step):
            part = cells[start : start + step]
            hosts = torch.tensor([place[cell.host.ids] for cell in part])
            edits = {}
            for layer in touched:
                chosen = [i for i, cell in enumerate(part) if layer in cell.layers]
                if chosen:
                    values = torch.stack([self._value(part[i], layer, outputs[layer], place) for i in chosen])[:, None]
                    where = torch.zeros(len(chosen), 1, dtype=torch.long)
                    edits[layer] = (mixer_output, write_donor, donor_stands, (values, where, torch.tensor(chosen)))
            rows += self._step(ids, hosts, cache, saved, cells=part, edits=edits)
        return rows

    def _step(self, ids, rows, cache, saved, *, cells=None, edits=None, capture_at=()):
        """One token for each of `rows` of the prefixes, from a fresh copy of their caches."""
        model, layers, embed = self.model, self.model.layers, self.model.embed
        write_cache(cache, saved, rows.to(model.device))
        tokens = ids[rows].to(model.device)
        inputs = {
            "input_ids": tokens[:, -1:],
            "attention_mask": torch.ones_like(tokens),
            "cache": cache,
            "use_cache": True,
        }
        self.tokens += len(rows)
        if cells is None:
            with torch.no_grad(), model.lm.trace(**inputs):
                seen = nnsight.save({})
                for i in capture_at:
                    seen[i] = mixer_output(layers[i].mixer)[:, -1].clone()
            return dict(seen)
        watch = {layer: model.attention_op(layer) for layer in sorted({layer for c in cells for layer, _ in c.watch})}
        entries = _entries([cell.host for cell in cells]) if watch else None
        asked = _tokens(cells)
        with torch.no_grad(), model.lm.trace(**inputs) as tracer:
            seen = nnsight.save({})
            seen.update(apply_edits(layers, embed, edits, watch, entries))
            seen["answer"] = measure.answer(tracer.result.logits[:, -1], asked)
        self._verify(cells, seen, seen["answer"]["finite"].all())
        return self._rows(cells, seen)

    def _value(self, cell: Cell, layer: int, outputs: torch.Tensor, place: dict) -> torch.Tensor:
        donor = outputs[place[cell.donor.ids]]
        return donor if cell.mode != "random" else _noisy(cell, layer, outputs[place[cell.host.ids]], donor)

    def means(self) -> dict[int, torch.Tensor]:
        """The mean output of every mixer over the text's train part: one (d_model,) tensor per layer."""
        if self._means is None:
            if self.text is None:
                raise RunError("mean removal needs a text: pass --text")
            sums: dict[int, torch.Tensor] = {}
            count = 0
            chunks = self.text.chunks(self.model.tokenizer, "train", n=self.text.count)
            size = max(1, self.batch_tokens // len(chunks[0]))
            for start in range(0, len(chunks), size):
                ids = _ids(chunks[start : start + size])
                everywhere = torch.arange(ids.shape[1]).expand(ids.shape[0], -1)
                for layer, output in self._capture(ids, everywhere).items():
                    sums[layer] = sums.get(layer, 0) + output.double().sum((0, 1))
                count += ids.numel()
            self._means = {layer: (total / count).float() for layer, total in sums.items()}
        return self._means

    # -- rows --------------------------------------------------------------------
    def _rows(self, cells: list[Cell], seen: dict[str, Any]) -> list[dict[str, Any]]:
        answer = {name: value.cpu() for name, value in seen["answer"].items()}
        attention = {layer: mass.cpu() for layer, mass in seen["attention"].items()}
        words = self.model.tokenizer.convert_ids_to_tokens(answer["predicted"].tolist())
        rows = []
        for i, cell in enumerate(cells):
            row = {"said": words[i], "spread": float(answer["spread"][i])}
            logits = answer["logits"][i].tolist()
            for name, token in cell.outcomes:
                row[name] = bool(answer["predicted"][i] == token)
            if len(cell.outcomes) > 1:
                row["margin"] = logits[0] - logits[1]
            if cell.outcomes and cell.host.choices:
                row["chance"] = 1 / len(cell.host.choices)
                among = logits[len(cell.outcomes) : len(cell.outcomes) + len(cell.host.choices)]
                row["choice_correct"] = cell.host.choices[among.index(max(among))] == cell.outcomes[0][1]
            for layer, head in cell.watch:
                row[f"attn.L{layer}H{head}"] = attention[layer][i, head].tolist()
            rows.append(row)
        return rows

    def _verify(self, cells: list[Cell], seen: dict[str, Any], finite: torch.Tensor) -> None:
        first = cells[0]
        what = f"{first.intervention} {first.mode} at layers {first.columns()['layers'] or '-'} ({self.model.name})"
        if not bool(finite):
            raise RunError(f"NaN or infinite logits: {what}; try --dtype float32")
        for layer, size in seen["change"].items():
            if not bool(seen["landed"][layer]):
                raise RunError(f"the intervention did not fire: what {what} wrote does not stand at layer {layer}")
            touching = [cell for cell in cells if layer in cell.layers]
            if not float(size) > 0 and not all(cell.is_null for cell in touching):
                raise RunError(f"the intervention did not fire: {what} changed nothing at layer {layer}")


@contextmanager
def _threads(model: Any) -> Iterator[None]:
    """One thread for a small model on a CPU, for as long as it runs.

    Its matrices gain at most a third from a second thread, and lose an order of magnitude when another process
    wants that core: waiting threads spin. A fixed number also keeps sums, and so the table, the same.
    """
    before = torch.get_num_threads()
    if model.device.type == "cpu" and sum(p.numel() for p in model.module.parameters()) < SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def versions() -> dict[str, str]:
    """Versions that a result depends on; optional kernels, which transformers uses when they are there, included."""
    from encode_address import __version__

    kernels = {}
    for package in ("flash-linear-attention", "causal-conv1d", "mamba-ssm"):
        with suppress(PackageNotFoundError):
            kernels[package] = version(package)
    return {
        "encode_address": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "nnsight": nnsight.__version__,
        "python": platform.python_version(),
        **kernels,
    }


def _ids(prompts: Sequence[Prompt]) -> torch.Tensor:
    return torch.tensor([prompt.ids for prompt in prompts])


def _entries(prompts: Sequence[Prompt]) -> torch.Tensor:
    """(batch, entries, positions): 1 where a token belongs to an entry of the prompt's dictionary."""
    out = torch.zeros(len(prompts), len(prompts[0].keys), len(prompts[0]))
    for row, prompt in enumerate(prompts):
        for entry in range(len(prompt.keys)):
            out[row, entry, list(prompt.span(f"entry {entry}"))] = 1
    return out


def _tokens(cells: Sequence[Cell]) -> torch.Tensor:
    """(batch, m): each cell's outcomes, then its host's choices; short rows are filled with token 0."""
    rows = [[token for _, token in cell.outcomes] + list(cell.host.choices) for cell in cells]
    width = max(len(row) for row in rows)
    return torch.tensor([row + [0] * (width - len(row)) for row in rows])


def _noisy(cell: Cell, layer: int, host: torch.Tensor, donor: torch.Tensor) -> torch.Tensor:
    """The host's output plus noise of the size of donor - host, at every position (last dimension: d_model)."""
    noise = torch.randn(host.shape, generator=_generator(cell.seed, layer, cell.host.ids)).to(host)
    return host + noise / noise.norm(dim=-1, keepdim=True) * (donor - host).norm(dim=-1, keepdim=True)


def _generator(seed: int, layer: int, ids: tuple[int, ...]) -> torch.Generator:
    digest = hashlib.sha256(f"{seed},{layer},{ids}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:6], "big"))
