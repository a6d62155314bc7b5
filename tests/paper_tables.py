"""Tables of several experiments on one model, made by hand, for figures of the paper: every number in them is chosen here."""

from __future__ import annotations

from itertools import product

import pandas as pd

from encode_address.experiments.state_rank import MEASURES
from encode_address.models.layout import Layout

PAIRS, ENTRIES = 10, 8
WORDS = {"keys": ["apple", "potato", "cherry", "date", "elder", "fig", "grape", "carrot"],
         "values": ["red", "yellow", "orange", "gold", "gray", "black", "white", "blue"]}  # fmt: skip


def mass(entry: int, amount: float) -> list[float]:
    return [amount if i == entry else (1 - amount) / ENTRIES for i in range(ENTRIES)]


def layout(softmax: list[int], last: int) -> dict:
    kinds = ["full_attention" if i in softmax else "linear_attention" for i in range(last + 1)]
    blocks = Layout.from_config({"layer_types": kinds}).blocks
    return {
        "blocks": [{"name": b.name, "layers": list(b.layers), "reader": b.reader} for b in blocks],
        "softmax": softmax,
    }


def view(address: list[str], readers: list[str], softmax: list[int], last: int) -> dict:
    return {"encode": ["G0"], "address": address, "readers": readers, "layout": layout(softmax, last)}


TINY = view(["G2"], ["L7H1", "L7H0"], [1, 3, 7], 7)
GRANITE = view(["G2", "G3"], ["L25H2", "L25H8", "L35H1"], [5, 15, 25, 35], 39)
CHAIN = ["L59H3", "L39H15", "L43H22", "L51H20", "L59H21"]
DEEP = view([f"G{i}" for i in range(8, 13)], CHAIN, list(range(3, 64, 4)), 63)
VERDICTS = {"tiny": TINY, "granite": GRANITE, "deep": DEEP}


def own(amount: float):
    return lambda pair: (pair % ENTRIES, amount)


def donors(amount: float):
    return lambda pair: ((pair + 3) % ENTRIES, amount)


class Made:
    """A table by hand, of a circuit that is what the verdict says."""

    def __init__(self, view: dict, variant: str = "chat8", model: str = "org/model") -> None:
        self.view, self.rows, self.address = view, [], "+".join(view["address"])
        self.shared = {"model": model, "variant": variant, "split": "confirmation"}
        self.blocks = [b["name"] for b in view["layout"]["blocks"]]

    def add(self, first: int = 0, looks=None, outcome: str = "redirected", **columns) -> Made:
        """A row per pair. `outcome` is true of the first so many; `looks`: where all heads or each one look, by pair."""
        looks = looks if isinstance(looks, dict) else dict.fromkeys(self.view["readers"], looks) if looks else {}
        for pair in range(PAIRS):
            places = {"target": pair % ENTRIES, "host_index": pair % ENTRIES, "donor_index": (pair + 3) % ENTRIES}
            seen = {f"attn.{head}": mass(*look(pair)) for head, look in looks.items()}
            result = {outcome: first > pair, "kept": first <= pair}
            self.rows.append({**self.shared, "pair": pair, **places, **seen, **result, **columns})
        return self

    def swaps(self, removed: int = 2) -> Made:
        for form in ("clean", "corrupted"):
            shared = {"outcome": "correct", "form": form, "position": "all"}
            self.add(PAIRS, own(0.9), experiment="baseline", intervention="none", **shared)
            here = {"experiment": "removal", "intervention": "remove", "block": self.address, "mode": "zero"}
            self.add(removed, lambda k: (k % ENTRIES, 0.9 if k < removed else 0.1), **here, **shared)
        return self

    def question(self, block: str, position: str, first: int, looks=None) -> Made:
        verb = (
            {"intervention": "transplant", "donor": "same-dictionary"} if block else {"intervention": "none", **WORDS}
        )
        looks = looks or (lambda k: (donors if k < first else own)(0.8)(k))
        return self.add(first, looks, experiment="transplant", block=block, position=position, said="▁red", **verb)

    def questions(self) -> Made:
        self.question("", "final", 0)
        return self.question(self.address, "final", 9).question(self.address, "question-before", 1)

    def sides(self) -> Made:
        before = self.blocks[self.blocks.index(self.view["address"][0]) - 1]
        for block, query, key in product((self.address, before), ("intact", "without"), ("intact", "without")):
            looks = own(0.05 if query == "without" and block == self.address else 0.8)
            shared = {"experiment": "query-key", "ablation": "zero", "block": block}
            self.add(0, looks, query_from=query, key_from=key, **shared)
        return self

    def states(self) -> Made:
        for block in self.blocks:
            shared = {"experiment": "state", "block": block, "donor": "same-dictionary"}
            for mode, first in (("recurrent", 8), ("conv", 3), ("both", 10)):
                self.add(first * (block in self.view["address"]), intervention="state", mode=mode, **shared)
            self.add(1, intervention="input", **shared)
        return self

    def upstream(self) -> Made:
        others = [b for b in self.blocks if b not in self.view["address"]]
        for i, without in enumerate(["", *others, "feeders", "all before"]):
            for donor in ("same-dictionary", "itself"):
                self.add(PAIRS - i, experiment="upstream", block=self.address, without=without, donor=donor)
        return self

    def scaling(self) -> Made:
        self.add(0, own(0.8), experiment="scaling", arm="host", block="", reader="")
        for block in dict.fromkeys([*self.view["address"], self.address]):
            self.add(7, donors(0.8), experiment="scaling", arm="transplant", block=block, reader="")
        return self

    def ranks(self) -> Made:
        for block in self.view["layout"]["blocks"]:
            role = next((r for r in ("Encode", "Address") if block["name"] in self.view[r.lower()]), "feeder")
            shared = {"experiment": "state-rank", "source": "task", "mark": "dictionary end", "role": role}
            for layer, head, pair in product(block["layers"], range(8), range(2)):
                place = {"block": block["name"], "layer": layer, "head": head, "pair": pair}
                self.rows.append({**self.shared, **shared, **place, **dict.fromkeys(MEASURES, 1.0 + layer + head)})
        return self

    def transfer(self) -> Made:
        fit = {"keys": "disjoint", "fit_variant": self.shared["variant"], "fit_keys": 40}
        for donor, extra in (("org/tiny-gdn", 0), ("org/NVIDIA-Nemotron-Nano-9B-v2", 1)):
            shared = {"experiment": "transfer", "donor_model": donor}
            self.add(0, condition="host", **shared).add(10, condition="same-model", **shared)
            for condition, prompts, first in (("mapped", 400, 8 + extra), ("mapped", 25, 2), ("shuffled", 400, 1)):
                self.add(first, condition=condition, fit_prompts=prompts, **fit, **shared)
        return self

    def lent(self, donor: str, disjoint: int, shared: int, controls: int = 1) -> Made:
        """What `transfer` keeps of a donor: so many of the pairs are redirected by the map of each split of keys."""
        told = {"experiment": "transfer", "donor_model": donor, "block": self.address, "dictionary_seed": 0}
        self.add(0, own(0.8), condition="host", **told).add(9, condition="same-model", source=self.address, **told)
        for keys, first in (("disjoint", disjoint), ("shared", shared)):
            fit = {
                "keys": keys,
                "fit_variant": self.shared["variant"],
                "fit_keys": 40,
                "source": "G4",
                "map_r2_test": 0.5,
            }
            for condition, right in (("mapped", first), ("mapped-self", 2), ("shuffled", controls), ("mean", 0)):
                self.add(right, donors(0.7), condition=condition, fit_prompts=400, **fit, **told)
            self.add(10, condition="mapped", fit_prompts=25, **fit, **told)
        for source, right in (("G1", 3), ("G2", 5)):
            other = {**fit, "keys": "disjoint", "source": source, "fit_prompts": 400}
            self.add(right, condition="other-source", **other, **told)
        return self

    def stood_in(self, donor: str, right: int, other: int = 2, **more) -> Made:
        """What `replace` keeps of a donor: so many pairs are right with its block, and with its block G1."""
        told = {
            "experiment": "replace",
            "donor_model": donor,
            "block": self.address,
            "outcome": "correct",
            "role": "address",
        }
        arms = {"intact": 10, "removed": 1, "linear": 2, "mean": 0, "donor": right, "zeroed": 1, "shuffled": 0, "donor G0": 0,
                "donor G1": other, "own, refitted": 9, "identity": 10}  # fmt: skip
        for arm, first in arms.items():
            source = arm.removeprefix("donor ") if arm.startswith("donor ") else "G4"
            self.add(first, own(first / 10), arm=arm, source=source, margin=1.0, **told, **more)
        return self

    def table(self) -> pd.DataFrame:
        return pd.DataFrame(self.rows)


def full(view: dict) -> pd.DataFrame:
    return Made(view).swaps().questions().sides().states().upstream().scaling().ranks().table()


def lending(hosts: dict[str, dict]) -> dict[str, pd.DataFrame]:
    """Each host's table with all the others for donors; the further apart two are in the list, the less moves."""
    made = {}
    for i, (host, verdict) in enumerate(hosts.items()):
        made[host] = Made(verdict, model=host)
        for j, donor in enumerate(hosts):
            if i != j:
                made[host].lent(donor, 8 - abs(i - j), 9).stood_in(donor, 9 - 2 * abs(i - j))
    return {host: one.table() for host, one in made.items()}


def both(*tables: pd.DataFrame) -> pd.DataFrame:
    return pd.concat(tables, ignore_index=True)


def readers_apart() -> pd.DataFrame:
    """As in the smaller Granite: G2 moves the first reader and not the answer, both blocks together move both."""
    made = Made(GRANITE).question("", "final", 0)
    for block, early, late, first in (("G2", 0.8, 0.1, 1), ("G3", 0.05, 0.6, 2), ("G2+G3", 0.85, 0.7, 10)):
        looks = {"L25H2": donors(early), "L25H8": donors(early / 2), "L35H1": donors(late)}
        made.question(block, "final", first, looks)
    return made.table()


def single_blocks(view: dict) -> pd.DataFrame:
    """Each block of the Address by itself, which moves nearly nothing."""
    made = Made(view)
    for block in view["address"]:
        made.question(block, "final", 1)
    return made.table()
