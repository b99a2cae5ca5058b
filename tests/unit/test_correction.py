"""The correction table, the names that stand for one, and the formula that is printed."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from asyncrl.correction import Correction, Reject, Weight, formula, parse_shorthand, table_of

GEOMETRIC_RS = Reject(statistic="k1", aggregate="mean", bounds=(0.999, 1.001))
SEQUENCE_TIS = Weight(level="sequence", bounds=(None, 2.0), outside="truncate")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", Correction()),
        ("bypass_none", Correction(mode="bypass")),
        ("token_tis", Correction(weight=Weight(level="token"))),
        ("token_icepop", Correction(weight=Weight(level="token", bounds=(0.5, 5), outside="zero"))),
        ("sequence_tis_geometric_rs", Correction(weight=SEQUENCE_TIS, reject=(GEOMETRIC_RS,))),
        ("decoupled_geo_rs_seq_tis", Correction(weight=SEQUENCE_TIS, reject=(GEOMETRIC_RS,))),
        (
            "decoupled_seq_is_rs",
            Correction(
                weight=SEQUENCE_TIS,
                reject=(Reject(statistic="k1", aggregate="sum", bounds=(0.5, 2.0)),),
            ),
        ),
        (
            "bypass_k3_rs",
            Correction(
                mode="bypass",
                reject=(Reject(statistic="k3", aggregate="mean", bounds=(None, 0.01)),),
            ),
        ),
        (
            "token_rs_geometric_rs",
            Correction(
                reject=(
                    Reject(statistic="k1", aggregate="token", bounds=(0.5, 2.0)),
                    GEOMETRIC_RS,
                )
            ),
        ),
    ],
)
def test_shorthand_stands_for_the_table(name: str, expected: Correction) -> None:
    assert Correction.model_validate(parse_shorthand(name)) == expected


@pytest.mark.parametrize(
    "name",
    ["", "tis", "sequence", "k3_tis", "sequence_tis_geometric", "a_rs"],
)
def test_other_names_are_refused_with_the_grammar(name: str) -> None:
    with pytest.raises(ValueError, match="is not understood; a shorthand is"):
        parse_shorthand(name)


@pytest.mark.parametrize("name", ["sequence_tis_token_icepop", "token_tis_is"])
def test_second_weight_in_a_shorthand_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="only one weight is possible, so token_"):
        parse_shorthand(name)


@pytest.mark.parametrize("value", [None, [], 3])
def test_neither_shorthand_nor_table_is_answered_with_both(value: object) -> None:
    with pytest.raises(ValueError, match="'none' for no correction, a shorthand such as .* table"):
        table_of(value)


@pytest.mark.parametrize(
    ("bounds", "reason"),
    [
        ((None, None), "bound nothing"),
        ((2.0, 0.5), "the lower one is above"),
        ((-1.0, 2.0), "each is a ratio > 0"),
        ((0.5, float("inf")), "each is a ratio > 0"),
        ((float("nan"), 2.0), "each is a ratio > 0"),
    ],
)
def test_bounds_that_bound_nothing_sensible_are_refused(
    bounds: tuple[float | None, float | None], reason: str
) -> None:
    with pytest.raises(ValidationError, match=reason):
        Weight(bounds=bounds)
    with pytest.raises(ValidationError, match=reason):
        Reject(bounds=bounds)


def test_ratio_is_never_counted_twice() -> None:
    with pytest.raises(ValidationError, match="count the same ratio twice"):
        Correction(mode="bypass", weight=Weight())


@pytest.mark.parametrize("veto", [0.0, 1.0, -1.0])
def test_veto_is_a_ratio_between_0_and_1(veto: float) -> None:
    with pytest.raises(ValidationError, match="a ratio between 0 and 1"):
        Correction(veto=veto)


def test_only_a_table_that_weights_or_rejects_is_active() -> None:
    assert not Correction().is_active
    assert not Correction(mode="bypass").is_active
    assert Correction(weight=Weight()).is_active
    assert Correction(reject=(GEOMETRIC_RS,)).is_active
    assert Correction(veto=1e-4).is_active


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (
            Correction(),
            "loss ratio = current / proximal; no weight, no rejection (metrics only)",
        ),
        (
            Correction(weight=SEQUENCE_TIS, reject=(GEOMETRIC_RS,)),
            "loss ratio = current / proximal; loss x w, w = product over the trajectory of "
            "proximal / behavior, truncated to [0, 2]; trajectory kept if the geometric mean of "
            "proximal / behavior is in [0.999, 1.001]",
        ),
        (
            Correction(
                weight=Weight(level="token", bounds=(0.5, 5), outside="zero", normalize="batch"),
                veto=1e-4,
            ),
            "loss ratio = current / proximal; loss x w, w = the token's proximal / behavior, "
            "set to 0 outside [0.5, 5], divided by the batch mean; trajectory rejected if any "
            "token's proximal / behavior < 0.0001",
        ),
        (
            Correction(
                mode="bypass",
                reject=(
                    Reject(statistic="k3", aggregate="mean", bounds=(None, 0.01)),
                    Reject(statistic="ratio", aggregate="token", bounds=(0.5, None)),
                ),
            ),
            "loss ratio = current / behavior; trajectory kept if the mean of k3 of current / "
            "behavior is in [0, 0.01]; token kept if its current / behavior is in [0.5, inf]",
        ),
        (
            Correction(compat="verl", reject=(GEOMETRIC_RS,)),
            "loss ratio = current / proximal; trajectory kept if the geometric mean of "
            "behavior / proximal is in [0.999, 1.001]",
        ),
    ],
)
def test_formula_says_what_is_computed(correction: Correction, expected: str) -> None:
    assert formula(correction) == expected
