"""The rollout-correction table (independent fields, never an enumeration) and its shorthand.

A name such as `sequence_tis_geometric_rs` is parsed by a small grammar into the table; `formula`
says in one line what is then computed. No arithmetic here: that is `asyncrl.kernels`.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

Bounds = tuple[float | None, float | None]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


def _check_bounds(bounds: Bounds, *, name: str) -> Bounds:
    lower, upper = bounds
    for value in bounds:
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} bounds {list(bounds)}: each is a ratio > 0, or null for none")
    if lower is None and upper is None:
        raise ValueError(f"{name} bounds [null, null] bound nothing; set one of them")
    if lower is not None and upper is not None and lower > upper:
        raise ValueError(f"{name} bounds {list(bounds)}: the lower one is above the upper one")
    return bounds


class Weight(_Table):
    """Importance weight w = proximal / behavior that multiplies the loss."""

    level: Literal["token", "sequence", "geometric"] = "sequence"
    bounds: Bounds = (None, 2.0)
    outside: Literal["truncate", "zero"] = "truncate"
    """What becomes of a weight outside the bounds: TIS truncates it, IcePop sets it to zero."""
    normalize: Literal["batch"] | None = None
    """batch: divided by the mean weight of the whole batch, over all ranks."""

    @field_validator("bounds")
    @classmethod
    def _legal(cls, value: Bounds) -> Bounds:
        return _check_bounds(value, name="weight")


class Reject(_Table):
    """One rejection rule; all rules must pass."""

    statistic: Literal["ratio", "k1", "k2", "k3"] = "k1"
    aggregate: Literal["token", "sum", "mean", "max"] = "mean"
    bounds: Bounds

    @field_validator("bounds")
    @classmethod
    def _legal(cls, value: Bounds) -> Bounds:
        return _check_bounds(value, name="reject")


class Correction(_Table):
    """What is done about the distance between the sampling policy and the trained one."""

    mode: Literal["decoupled", "bypass"] = "decoupled"
    """decoupled: behavior, proximal and current policy; bypass: behavior is the old policy."""
    weight: Weight | None = None
    reject: tuple[Reject, ...] = ()
    veto: float | None = None
    """A trajectory with any token ratio below this is rejected."""
    compat: Literal["verl"] | None = None
    """verl: its exact k1 sign, for parity runs."""

    @model_validator(mode="after")
    def _counts_no_ratio_twice(self) -> Correction:
        if self.mode == "bypass" and self.weight is not None:
            raise ValueError(
                "async.rollout_correction: mode bypass with a weight would count the same ratio "
                "twice (the clipped loss already carries current / behavior); set weight: null or "
                "mode: decoupled"
            )
        if self.veto is not None and not 0 < self.veto < 1:
            raise ValueError(f"async.rollout_correction.veto={self.veto}: a ratio between 0 and 1")
        return self

    @property
    def is_active(self) -> bool:
        """Whether anything is weighted or rejected."""
        return bool(self.weight or self.reject or self.veto)


_LEVELS = {"seq": "sequence", "geo": "geometric"}
_WEIGHTS: dict[str, tuple[str, list[float | None]]] = {
    "tis": ("truncate", [None, 2.0]),
    "is": ("truncate", [None, 2.0]),
    "icepop": ("zero", [0.5, 5.0]),
}
_WEIGHT_LEVELS = ("token", "sequence", "geometric")
_REJECTS: dict[str, dict[str, Any]] = {
    "token": {"statistic": "k1", "aggregate": "token", "bounds": [0.5, 2.0]},
    "sequence": {"statistic": "k1", "aggregate": "sum", "bounds": [0.5, 2.0]},
    "geometric": {"statistic": "k1", "aggregate": "mean", "bounds": [0.999, 1.001]},
    "k3": {"statistic": "k3", "aggregate": "mean", "bounds": [None, 0.01]},
}
_GRAMMAR = (
    "a shorthand is [decoupled_|bypass_] followed by levels (token, sequence, geometric, k3), each "
    "with what it does (tis or icepop: the weight, once; rs: a rejection), joined by '_', such as "
    "sequence_tis_geometric_rs, or 'none'"
)


def table_of(value: Any) -> dict[str, Any]:
    """The table that a setting stands for: itself, or what its shorthand says.

    Raises ValueError, without the setting's key, for what is neither.
    """
    if isinstance(value, str):
        return parse_shorthand(value)
    if isinstance(value, dict):
        return value
    raise ValueError(
        "neither a name nor a table; give 'none' for no correction, a shorthand such as "
        "sequence_tis_geometric_rs, or a table with the fields "
        f"{', '.join(Correction.model_fields)}"
    )


def parse_shorthand(text: str) -> dict[str, Any]:
    """The table that a name such as `sequence_tis_geometric_rs` stands for.

    Grammar: [mode] (level (weight | "rs")+)*, words joined by "_". Bounds are those of verl's
    presets of these names. Raises ValueError with the grammar for anything else.
    """
    words = text.lower().split("_")
    table: dict[str, Any] = {"mode": "decoupled", "weight": None, "reject": []}
    if words[0] in ("decoupled", "bypass"):
        table["mode"] = words.pop(0)
    if words in ([], ["none"]):
        return table
    level = ""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "rs" and level in _REJECTS:
            table["reject"].append(dict(_REJECTS[level]))
        elif word in _WEIGHTS and level in _WEIGHT_LEVELS:
            if table["weight"] is not None:
                raise ValueError(
                    f"only one weight is possible, so {level}_{word} cannot follow the weight that "
                    f"is already given; {_GRAMMAR}"
                )
            outside, bounds = _WEIGHTS[word]
            table["weight"] = {"level": level, "outside": outside, "bounds": bounds}
        elif _LEVELS.get(word, word) in _REJECTS and (following == "rs" or following in _WEIGHTS):
            level = _LEVELS.get(word, word)
        else:
            raise ValueError(f"{word!r} is not understood; {_GRAMMAR}")
    return table


def formula(correction: Correction) -> str:
    """What is computed, in one line, for the start-up screen and `--dry-run`."""
    is_decoupled = correction.mode == "decoupled"
    parts = [f"loss ratio = current / {'proximal' if is_decoupled else 'behavior'}"]
    if correction.weight is not None:
        parts.append(_weight_formula(correction.weight))
    over = f"{'proximal' if is_decoupled else 'current'} / behavior"
    if correction.compat == "verl":
        over = " / ".join(reversed(over.split(" / ")))
    parts.extend(_reject_formula(rule, over=over) for rule in correction.reject)
    if correction.veto is not None:
        parts.append(f"trajectory rejected if any token's {over} < {correction.veto:g}")
    if not correction.is_active:
        parts.append("no weight, no rejection (metrics only)")
    return "; ".join(parts)


def _weight_formula(weight: Weight) -> str:
    raw = {
        "token": "the token's",
        "sequence": "product over the trajectory of",
        "geometric": "geometric mean over the trajectory of",
    }[weight.level]
    bounded = {"truncate": "truncated to", "zero": "set to 0 outside"}[weight.outside]
    norm = ", divided by the batch mean" if weight.normalize else ""
    return f"loss x w, w = {raw} proximal / behavior, {bounded} {_show(weight.bounds)}{norm}"


def _reject_formula(rule: Reject, *, over: str) -> str:
    unit = "token" if rule.aggregate == "token" else "trajectory"
    if rule.statistic == "k1":  # bounded as a ratio: exp of the aggregated log-ratio
        what = {
            "token": "its",
            "sum": "the product of",
            "mean": "the geometric mean of",
            "max": "the largest",
        }[rule.aggregate]
    else:
        aggregate = "its" if rule.aggregate == "token" else f"the {rule.aggregate} of"
        what = f"{aggregate} {'' if rule.statistic == 'ratio' else rule.statistic + ' of '}".strip()
    return f"{unit} kept if {what} {over} is in {_show(rule.bounds)}"


def _show(bounds: Bounds) -> str:
    lower, upper = bounds
    return f"[{'0' if lower is None else f'{lower:g}'}, {'inf' if upper is None else f'{upper:g}'}]"
