"""The decision rule on hand-made tables: it sees what is there and refuses what is not."""

from __future__ import annotations

import pandas as pd
import pytest

from encode_address import rule
from encode_address.models.layout import Layout

N = 60
# G0 [0] L1  G1 [2] L3  G2 [4] L5  G3 [6] L7  G4 [8], which no softmax layer follows
LAYOUT = Layout.from_config({"layer_types": ["linear_attention", "full_attention"] * 4 + ["linear_attention"]})
BLOCKS = [block.name for block in LAYOUT.blocks]
HEAD = "L7H0"


class Table:
    """Rows of both splits, made setting by setting; shares are turned into that many true pairs of N."""

    def __init__(self, variant: str = "chat8") -> None:
        self.rows: list[dict] = []
        self.variant = variant

    def add(self, share: float, column: str, other: dict | None = None, split: str = "", **factors) -> Table:
        for each in [split] if split else ["discovery", "confirmation"]:
            for pair in range(N):
                row = {"variant": self.variant, "split": each, "pair": pair, **factors, **(other or {})}
                row[column] = pair < round(share * N)
                self.rows.append(row)
        return self

    def intact(self, accuracy: float = 1.0) -> Table:
        for form in ("clean", "corrupted"):
            self.add(accuracy, "correct", {"margin": 10.0}, experiment="baseline", form=form)
        return self

    def hosts(self, preference: float = -1.0) -> Table:
        """The unpatched hosts; `preference` is their head's attention on the donor's entry minus that on their own."""
        masses = [(1 + preference) / 2, (1 - preference) / 2, 0.0]
        shared = {"experiment": "transplant", "intervention": "none", "position": "final"}
        shared |= {"host_index": 1, "donor_index": 0, f"attn.{HEAD}": masses}
        return self.add(1.0, "kept", {"redirected": False}, **shared)

    def removal(self, block: str, accuracy: float) -> Table:
        return self.add(accuracy, "correct", {"margin": 0.0}, experiment="removal", block=block, mode="zero")

    def encode(self, carries: dict[str, float]) -> Table:
        for swap in ("value", "key"):
            for block in BLOCKS:
                self.add(carries.get(block, 0.0), "carried", experiment="encode", block=block, swap=swap)
        return self

    def transplant(
        self,
        block: str,
        redirect: float,
        *,
        control: float = 0.0,
        outcome: str = "host_value_of_key_A",
        attention: float | None = None,
        split: str = "",
    ) -> Table:
        """One set of blocks: `control` is the share that every control donor redirects."""
        moves = redirect if attention is None else attention
        masses = [moves, 1 - moves, 0.0]
        shared = {"experiment": "transplant", "intervention": "transplant", "position": "final", "block": block}
        shared |= {"host_index": 1, "donor_index": 0, f"attn.{HEAD}": masses}
        self.add(redirect, "redirected", {"kept": False}, split, **shared, donor="same-dictionary")
        for donor in ("permuted", "random"):
            self.add(control, "redirected", {"kept": False}, split, **shared, donor=donor)
        for donor in ("identity", "other-dictionary"):
            self.add(1 - control, "kept", {"redirected": False}, split, **shared, donor=donor)
        outcomes = dict.fromkeys(rule.OUTCOMES, False)
        outcomes.pop(outcome)
        self.add(redirect, outcome, outcomes, split, **shared, donor="dissociation")
        return self

    def readers(self, lost: dict[str, float]) -> Table:
        for head, share in lost.items():
            for form in ("clean", "corrupted"):
                other = {"margin": 10 * (1 - share)}
                self.add(1.0, "correct", other, experiment="readers", reader=head, form=form)
        return self

    def frame(self) -> pd.DataFrame:
        return pd.DataFrame(self.rows)


def complete(redirects: dict[str, float], variant: str = "chat8", encode: str = "G0", **kwargs) -> Table:
    """A table in which the singles redirect as said (others not at all), Encode is clean and one head reads."""
    table = Table(variant).intact().hosts().encode({encode: 1.0} if encode else {}).readers({HEAD: 0.4, "L7H1": 0.0})
    for block in BLOCKS:
        table.transplant(block, redirects.get(block, 0.0), **(kwargs if block in redirects else {}))
    return table


def judge(*tables: Table) -> rule.Verdict:
    frame = pd.concat([table.frame() for table in tables], ignore_index=True)
    return rule.judge(frame, LAYOUT, [table.variant for table in tables])


def test_one_block_is_found() -> None:
    verdict = judge(complete({"G2": 0.95}))
    assert (verdict.status, verdict.encode, verdict.address) == ("FOUND", ("G0",), ("G2",))
    assert verdict.readers == (HEAD,)
    assert verdict.address_kind == "key"
    assert verdict.variants[0].address.status == "found"


def test_below_nine_tenths_is_partial() -> None:
    verdict = judge(complete({"G2": 0.8}))
    assert verdict.status == "FOUND"
    assert verdict.variants[0].address.status == "partial"
    assert "partial on chat8" in verdict.reason


@pytest.mark.parametrize("redirect", [0.5, 0.55])
def test_the_lower_bound_decides_not_the_value(redirect: float) -> None:
    verdict = judge(complete({"G2": redirect}))
    assert verdict.status == "UNDECIDED"
    assert verdict.address == ()
    assert "no set of blocks redirects" in verdict.reason


def test_nothing_moves() -> None:
    verdict = judge(complete({}))
    assert (verdict.status, verdict.address, verdict.readers) == ("UNDECIDED", (), ())


def test_a_model_that_cannot_do_the_task_is_undecided_whatever_the_rest_says() -> None:
    table = complete({"G2": 0.95})
    rows = table.frame()
    rows.loc[rows["experiment"] == "baseline", "correct"] = rows["pair"] < 0.5 * N
    verdict = rule.judge(rows, LAYOUT, ["chat8"])
    assert verdict.status == "UNDECIDED"
    assert (verdict.encode, verdict.address, verdict.readers) == ((), (), ())
    assert "cannot do the task" in verdict.reason


def test_controls_that_move_as_much_refuse() -> None:
    verdict = judge(complete({"G2": 0.95}, control=0.9))
    assert verdict.status == "UNDECIDED"
    assert "controls move as much" in verdict.reason


@pytest.mark.parametrize("donor", ["identity", "other-dictionary", "permuted", "random"])
def test_each_control_counts_on_its_own(donor: str) -> None:
    rows = complete({"G2": 0.95}).frame()
    hit = (rows["block"] == "G2") & (rows["donor"] == donor)
    rows.loc[hit, "redirected"], rows.loc[hit, "kept"] = True, False
    verdict = rule.judge(rows, LAYOUT, ["chat8"])
    assert verdict.status == "UNDECIDED"
    assert donor in verdict.reason


@pytest.mark.parametrize("donor", ["identity", "other-dictionary", "permuted", "random", "dissociation"])
def test_a_control_that_was_not_run_refuses(donor: str) -> None:
    rows = complete({"G2": 0.95}).frame()
    verdict = rule.judge(rows[rows["donor"] != donor], LAYOUT, ["chat8"])
    assert verdict.status == "UNDECIDED"
    assert donor in verdict.reason


def test_two_blocks_that_each_redirect_are_redundant_not_an_address() -> None:
    table = complete({"G1": 0.95, "G2": 0.93})
    assert rule.next_sets(_discovery(table), LAYOUT) == []
    verdict = judge(table)
    assert (verdict.status, verdict.address) == ("UNDECIDED", ())
    assert "G1 and G2 each redirect alone" in verdict.reason


def test_a_union_is_grown_only_when_no_single_redirects() -> None:
    table = complete({"G1": 0.1, "G2": 0.2})
    assert rule.next_sets(_discovery(table), LAYOUT) == ["G0+G1", "G1+G2", "G2+G3", "G0+G2"]
    table.transplant("G0+G1", 0.1).transplant("G1+G2", 0.97).transplant("G2+G3", 0.2).transplant("G0+G2", 0.2)
    assert rule.next_sets(_discovery(table), LAYOUT) == []
    verdict = judge(table)
    assert (verdict.status, verdict.address) == ("FOUND", ("G1", "G2"))


def test_a_union_must_do_what_no_member_does() -> None:
    """G2 nearly redirects alone; the union that adds G1 is no more than G2."""
    table = complete({"G2": 0.62}).transplant("G0+G1", 0.0).transplant("G1+G2", 0.65).transplant("G2+G3", 0.3)
    verdict = judge(table.transplant("G0+G2", 0.3))
    assert (verdict.status, verdict.address) == ("UNDECIDED", ())
    assert "G2 (" in verdict.reason


def test_too_few_pairs_are_not_taken_for_a_finding() -> None:
    rows = complete({"G2": 0.95}).frame()
    few = rule.judge(rows[rows["pair"] < 10], LAYOUT, ["chat8"])
    assert few.status == "UNDECIDED"
    assert "n is too small to tell" in few.reason
    more = rule.judge(rows[rows["pair"] < 20], LAYOUT, ["chat8"])
    assert "n is too small to tell that" in more.reason


def test_a_block_that_carries_one_swap_is_not_removal_only() -> None:
    table = complete({"G2": 0.95}).removal("G0", 0.0)
    rows = table.frame()
    hit = (rows["experiment"] == "encode") & (rows["block"] == "G0") & (rows["swap"] == "value")
    rows.loc[hit, "carried"] = rows.loc[hit, "pair"] < 0.3 * N
    verdict = rule.judge(rows, LAYOUT, ["chat8"])
    assert verdict.encode == ()
    assert verdict.variants[0].removal_only == ()


def test_an_empty_table_is_undecided_not_a_crash() -> None:
    rows = Table().intact().frame()
    verdict = rule.judge(rows, LAYOUT, ["chat8"])
    assert verdict.status == "UNDECIDED"


def test_ties_between_unions_are_all_reported() -> None:
    table = complete({"G1": 0.1, "G2": 0.2})
    table.transplant("G0+G1", 0.1).transplant("G1+G2", 0.97).transplant("G2+G3", 0.92).transplant("G0+G2", 0.2)
    verdict = judge(table)
    assert verdict.address == ("G1", "G2")
    assert verdict.variants[0].ties == ("G2+G3",)


def test_a_chain_is_found_by_the_best_additions() -> None:
    """G1 and G3 together, though not contiguous: the best single with each block added, before any larger union."""
    table = complete({"G1": 0.3, "G3": 0.1})
    assert rule.next_sets(_discovery(table), LAYOUT) == ["G0+G1", "G1+G2", "G2+G3", "G1+G3"]
    table.transplant("G0+G1", 0.3).transplant("G1+G2", 0.3).transplant("G2+G3", 0.3)
    table.transplant("G1+G3", 0.96)
    assert rule.next_sets(_discovery(table), LAYOUT) == []
    assert judge(table).address == ("G1", "G3")


def test_a_carried_answer_is_not_an_address() -> None:
    verdict = judge(complete({"G2": 0.95}, outcome="donor_value"))
    assert verdict.status == "UNDECIDED"
    assert "carries the donor's answer" in verdict.reason


@pytest.mark.parametrize(("outcome", "kind"), [("host_value_of_key_A", "key"), ("host_value_at_index_j", "index")])
def test_address_kind(outcome: str, kind: str) -> None:
    assert judge(complete({"G2": 0.95}, outcome=outcome)).address_kind == kind


def test_attention_moved_but_the_answer_did_not() -> None:
    table = complete({"G2": 0.0}, attention=0.9)
    verdict = judge(table)
    assert verdict.status == "UNDECIDED"
    assert verdict.variants[0].attention_only == ("G2",)


def test_a_head_that_always_preferred_the_donors_place_has_not_moved() -> None:
    """Some heads attend by place: more to the donor's index than to the host's whatever is asked."""
    rows = complete({"G2": 0.95}).frame()
    hosts = rows["intervention"] == "none"
    biased = Table().hosts(preference=0.88).frame()[f"attn.{HEAD}"].iloc[0]
    rows.loc[hosts, f"attn.{HEAD}"] = pd.Series([biased] * hosts.sum(), index=rows.index[hosts])
    verdict = rule.judge(rows, LAYOUT, ["chat8"])
    assert verdict.status == "UNDECIDED"
    assert "attends more to the donor's entry" in verdict.reason


def test_an_answer_that_moves_without_attention_is_no_address() -> None:
    verdict = judge(complete({"G2": 0.95}, attention=0.2))
    assert verdict.status == "UNDECIDED"
    assert "attends more to the donor's entry" in verdict.reason


def test_a_block_without_a_later_reader_is_never_the_address() -> None:
    verdict = judge(complete({"G4": 0.95}))
    assert (verdict.status, verdict.address) == ("UNDECIDED", ())
    assert "no softmax layer follows" in verdict.reason


def test_what_discovery_saw_must_hold_on_new_dictionaries() -> None:
    table = complete({})
    rows = table.frame()
    hit = (rows["block"] == "G2") & (rows["split"] == "discovery") & (rows["donor"] == "same-dictionary")
    rows.loc[hit, "redirected"] = True
    assert rule.judge(rows, LAYOUT, ["chat8"]).status == "UNDECIDED"


def test_encode_needs_both_swaps_and_silence_elsewhere() -> None:
    assert judge(complete({"G2": 0.95}, encode="")).encode == ()
    loud = complete({"G2": 0.95})
    rows = loud.frame()
    hit = (rows["experiment"] == "encode") & (rows["block"] == "G1") & (rows["swap"] == "key")
    rows.loc[hit, "carried"] = rows.loc[hit, "pair"] < 0.2 * N
    verdict = rule.judge(rows, LAYOUT, ["chat8"])
    assert (verdict.status, verdict.encode) == ("UNDECIDED", ())
    assert "so do others: G1 key swap" in verdict.reason


def test_a_block_that_only_passes_removal_is_reported_as_such() -> None:
    table = complete({"G2": 0.95}, encode="").removal("G0", 0.0).removal("G2", 0.1).removal("G1", 0.9)
    verdict = judge(table)
    assert verdict.encode == ()
    assert verdict.variants[0].removal_only == ("G0",)


def test_a_head_that_moves_but_costs_nothing_is_no_reader() -> None:
    table = Table().intact().hosts().encode({"G0": 1.0}).readers({HEAD: 0.01})
    for block in BLOCKS:
        table.transplant(block, 0.95 if block == "G2" else 0.0)
    verdict = judge(table)
    assert (verdict.status, verdict.readers) == ("UNDECIDED", ())
    assert "no head both moves and loses gap" in verdict.reason


def test_variants_must_agree() -> None:
    verdict = judge(complete({"G2": 0.95}), complete({"G1": 0.95}, variant="rev8"))
    assert verdict.status == "UNDECIDED"
    assert verdict.encode == ("G0",)
    assert verdict.address == ()
    assert "G2 on chat8" in verdict.reason
    assert "G1 on rev8" in verdict.reason


def test_variants_that_agree_are_found_together() -> None:
    verdict = judge(complete({"G2": 0.95}), complete({"G2": 0.92}, variant="rev8"))
    assert (verdict.status, verdict.address) == ("FOUND", ("G2",))
    content = verdict.as_dict()
    assert {"status", "encode", "address", "readers", "address_kind", "evidence", "reason"} <= set(content)
    assert {e["variant"] for e in content["evidence"]} == {"chat8", "rev8"}
    assert all({"claim", "value", "n", "low", "high"} <= set(e) for e in content["evidence"])


def _discovery(table: Table) -> pd.DataFrame:
    rows = table.frame()
    return rows[rows["split"] == "discovery"]
