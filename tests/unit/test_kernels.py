"""Kernels against golden numbers, against the torch definition, and at the edges of float32.

Golden numbers: hand calculation in double precision from the published formulas.
"""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from asyncrl import kernels
from asyncrl.kernels import reference

NAN, INF = math.nan, math.inf

# Two trajectories; the last token is masked and must not matter.
PROXIMAL = [-1.0, -0.5, -2.0, -0.1, -0.3, -1.2, -0.7, -9.0]
BEHAVIOR = [-1.2, -0.4, -1.5, -0.1, -0.35, -0.9, -2.9, -1.0]
MASK = [True] * 7 + [False]
OFFSETS = [0, 4, 8]

TIS = {"bounds": (None, 2.0), "outside": "truncate"}
ICEPOP = {"bounds": (0.7, 1.5), "outside": "zero"}


def pack(proximal=PROXIMAL, behavior=BEHAVIOR, offsets=OFFSETS, mask=MASK):
    return (
        np.array(proximal, np.float32),
        np.array(behavior, np.float32),
        np.array(offsets, np.int64),
        np.array(mask, bool),
    )


def to_torch(arrays, dtype=torch.float32):
    tensors = [torch.from_numpy(a) for a in arrays]
    return [t.to(dtype) if t.is_floating_point() else t for t in tensors]


@pytest.fixture(params=["native", "torch_float32", "torch_float64"])
def inputs(request):
    """The golden batch as numpy arrays, as tensors C++ reads in place, and as reference tensors."""
    if request.param == "native":
        return pack()
    return to_torch(pack(), getattr(torch, request.param.removeprefix("torch_")))


RAW = [1.22140276, 0.90483742, 0.60653066, 1, 1.0512711, 0.74081822, 9.0250135, 0]


@pytest.mark.parametrize(
    ("level", "options", "expected"),
    [
        ("token", {}, RAW),
        ("token", TIS, [min(w, 2.0) for w in RAW]),
        ("token", ICEPOP, [w if 0.7 <= w <= 1.5 else 0.0 for w in RAW]),
        ("sequence", {}, [0.67032005] * 4 + [7.02868758] * 3 + [0]),
        ("sequence", TIS, [0.67032005] * 4 + [2.0] * 3 + [0]),
        ("geometric", {}, [math.exp(-0.1)] * 4 + [math.exp(0.65)] * 3 + [0]),
    ],
)
def test_importance_weights_equal_the_golden_numbers(inputs, level, options, expected):
    weights = kernels.importance_weights(*inputs, level=level, **options)
    np.testing.assert_allclose(np.asarray(weights), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("level", "mean", "first", "last"),
    [
        ("token", 1.07498002, 1.13620973, 1.8604997),
        ("sequence", 1.33516002, 0.50205222, 1.49794779),
    ],
)
def test_normalized_weights_equal_the_golden_numbers(inputs, level, mean, first, last):
    weights = kernels.importance_weights(*inputs, level=level, **TIS)
    total, count = kernels.weight_normalizer(weights, inputs[2], inputs[3], level=level)
    assert total / count == pytest.approx(mean, rel=1e-6)
    assert float(weights[0]) / (total / count) == pytest.approx(first, rel=1e-6)
    assert float(weights[6]) / (total / count) == pytest.approx(last, rel=1e-6)


ALL, FIRST, SECOND, NONE = [1] * 7 + [0], [1] * 4 + [0] * 4, [0] * 4 + [1] * 3 + [0], [0] * 8


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        # Golden sums .15, 2.46625; means .0375, .82208333; maxima .125, 2.42 and likewise for k3.
        (("k1", "token", 0.6, 1.6), [1, 1, 1, 1, 1, 1, 0, 0]),
        (("ratio", "token", 0.6, 1.6), [1, 1, 1, 1, 1, 1, 0, 0]),
        (("k1", "sum", 0.5, 2.0), FIRST),
        (("k1", "sum", 7.0286, 7.0287), SECOND),
        (("k1", "mean", math.exp(-0.1) - 1e-6, math.exp(-0.1) + 1e-6), FIRST),
        (("k1", "mean", None, 1.915), FIRST),
        (("k1", "max", None, 1.2215), FIRST),
        (("k2", "token", None, 0.1), [1, 1, 0, 1, 1, 1, 0, 0]),
        (("k2", "sum", None, 0.149), NONE),
        (("k2", "sum", None, 0.151), FIRST),
        (("k2", "mean", None, 0.8221), ALL),
        (("k2", "mean", None, 0.8220), FIRST),
        (("k2", "max", None, 2.419), FIRST),
        (("k2", "max", 2.419, 2.421), SECOND),
        (("k3", "sum", 5.8671, 5.8672), SECOND),
        (("k3", "sum", None, 0.13278), FIRST),
        (("k3", "mean", None, 0.0332), FIRST),
        (("k3", "mean", 1.95570, 1.95571), SECOND),
        (("k3", "max", 5.8250, 5.8251), SECOND),
        (("k3", "max", None, 0.10654), FIRST),
        (("ratio", "mean", 3.60570, 3.60571), SECOND),
        (("ratio", "sum", None, 4 * 0.9332), FIRST),
        (("ratio", "max", None, 1.2214), NONE),
    ],
)
def test_rejection_equals_the_golden_statistics(inputs, rule, expected):
    kept = kernels.rejection_mask(*inputs, rules=[rule])
    assert np.asarray(kept).tolist() == [bool(k) for k in expected]


def test_verl_compat_applies_k1_bounds_to_the_inverse_ratio(inputs):
    kept = kernels.rejection_mask(*inputs, rules=[("k1", "token", 0.6, 1.6)], compat="verl")
    assert np.asarray(kept).tolist() == [True, True, False, True, True, True, False, False]


def test_verl_compat_sums_clamped_log_ratios():
    arrays = pack([30.0, -25.0], [0.0, 0.0], [0, 2], [True, True])
    rules = [("k1", "sum", 0.5, 2.0)]
    assert kernels.rejection_mask(*arrays, rules=rules).tolist() == [False, False]
    assert kernels.rejection_mask(*arrays, rules=rules, compat="verl").tolist() == [True, True]


def test_every_rule_must_pass(inputs):
    rules = [("k2", "token", None, 0.1), ("k1", "sum", 0.5, 2.0)]
    kept = kernels.rejection_mask(*inputs, rules=rules)
    assert np.asarray(kept).tolist() == [True, True, False, True, False, False, False, False]


def test_veto_rejects_the_whole_trajectory_of_a_token_below_it(inputs):
    kept = kernels.rejection_mask(*inputs, rules=[], veto=0.7)
    assert np.asarray(kept).tolist() == [bool(k) for k in SECOND]


GOLDEN_METRICS = {
    "weight_mean": 1.07498002,
    "weight_std": 0.42145041,
    "ess": 0.86677161,
    "ratio_fraction_high": 1 / 7,
    "ratio_fraction_low": 0.0,
    "ratio_max": 9.0250135,
    "ratio_min": 0.60653066,
    "ratio_mean": sum(RAW) / 7,
    "ratio_p50": 1.0,
    "ratio_p01": 0.60653066 + 0.06 * (0.74081822 - 0.60653066),
    "ratio_p99": 9.0250135 - 0.06 * (9.0250135 - 1.22140276),
    "kl": -0.22142857,
    "k3_kl": 0.85712481,
    "chi2_token": 11.39761228,
    "chi2_sequence": 23.92588903,
    "proximal_ppl": 2.27080609,
    "proximal_log_ppl": 0.81666667,
    "behavior_ppl": 3.10685716,
    "behavior_log_ppl": 1.09166667,
    "log_ppl_diff": -0.275,
    "log_ppl_abs_diff": 0.375,
    "log_ppl_diff_max": 0.1,
    "log_ppl_diff_min": -0.65,
    "ppl_ratio": 0.81360835,
    "num_nonfinite": 0.0,
    "num_tokens": 7.0,
    "rejected_token_fraction": 2 / 7,
    "rejected_sequence_fraction": 1.0,
}


def test_metrics_equal_the_golden_numbers(inputs):
    weights = kernels.importance_weights(*inputs, level="token", **TIS)
    kept = kernels.rejection_mask(*inputs, rules=[("k1", "token", 0.6, 1.6)], compat="verl")
    metrics = kernels.off_policy_metrics(
        *inputs, weights=weights, rejection_mask=kept, level="token", bounds=(None, 2.0)
    )
    expected = {f"correction/{name}": value for name, value in GOLDEN_METRICS.items()}
    assert metrics == pytest.approx(expected, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(
    ("level", "options", "mean", "std", "ess"),
    [
        ("token", ICEPOP, 0.70261850, 0.46427035, 0.69607874),
        ("sequence", TIS, 1.24018288, 0.65802092, 0.78032389),
    ],
)
def test_weight_metrics_equal_the_golden_numbers(inputs, level, options, mean, std, ess):
    weights = kernels.importance_weights(*inputs, level=level, **options)
    metrics = kernels.off_policy_metrics(*inputs, weights=weights, level=level)
    found = [metrics[f"correction/{name}"] for name in ("weight_mean", "weight_std", "ess")]
    assert found == pytest.approx([mean, std, ess], rel=1e-6)


def test_ratio_metrics_of_sequences_are_taken_over_sequences(inputs):
    metrics = kernels.off_policy_metrics(*inputs, level="sequence", bounds=(None, 2.0))
    assert metrics["correction/ratio_max"] == pytest.approx(7.02868758, rel=1e-6)
    assert metrics["correction/ratio_min"] == pytest.approx(0.67032005, rel=1e-6)
    assert metrics["correction/ratio_fraction_high"] == 0.5


# Every kind of wild token: non-finite either side, far ratios both ways, exact bounds, empty rows,
# length one, a row fully masked, NaN where masked.
EDGES = pack(
    proximal=[NAN, -INF, INF, -1.0, 0.0, 1000.0, -1000.0, 0.5, -0.5, 0.0, 30.0, -30.0, NAN, -2.0],
    behavior=[0.0, 0.0, 0.0, -INF, NAN, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, NAN],
    offsets=[0, 0, 5, 6, 7, 10, 10, 12, 14, 14],
    mask=[True] * 12 + [False] * 2,
)
HALF = math.exp(0.5)


def test_nonfinite_and_extreme_tokens_get_the_documented_token_weights():
    weights = kernels.importance_weights(*EDGES, level="token", bounds=(None, HALF))
    expected = [0.0] * 5 + [HALF, math.exp(-20), HALF, 1 / HALF, 1.0, HALF, math.exp(-20), 0, 0]
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


def test_a_ratio_exactly_at_a_bound_is_inside():
    bounds = (1 / HALF, HALF)
    weights = kernels.importance_weights(*EDGES, level="token", bounds=bounds, outside="zero")
    kept = kernels.rejection_mask(*EDGES, rules=[("k1", "token", *bounds)])
    assert kept.tolist() == [False] * 7 + [True] * 3 + [False] * 4
    np.testing.assert_array_equal(weights > 0, kept)


def test_nonfinite_tokens_are_counted_and_leave_the_metrics_finite():
    kept = kernels.rejection_mask(*EDGES, rules=[])
    metrics = kernels.off_policy_metrics(*EDGES, rejection_mask=kept)
    assert metrics["correction/num_nonfinite"] == 5
    assert metrics["correction/rejected_token_fraction"] == pytest.approx(5 / 12)
    assert metrics["correction/rejected_sequence_fraction"] == pytest.approx(1 / 5)
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_batch_without_trained_tokens_has_zero_weights_and_only_counts():
    arrays = pack(mask=[False] * 8)
    assert kernels.importance_weights(*arrays, level="sequence").tolist() == [0.0] * 8
    assert kernels.rejection_mask(*arrays, rules=[("k1", "mean", 0.9, 1.1)]).sum() == 0
    assert kernels.weight_normalizer(arrays[0], *arrays[2:], level="sequence") == (0.0, 0)
    metrics = kernels.off_policy_metrics(*arrays)
    assert metrics == {"correction/num_nonfinite": 0.0, "correction/num_tokens": 0.0}


def test_an_empty_batch_is_legal():
    arrays = pack([], [], [0], [])
    assert kernels.importance_weights(*arrays).shape == (0,)
    assert kernels.rejection_mask(*arrays, rules=[("k3", "max", None, 1.0)]).shape == (0,)


def random_batch(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 40, size=17)
    total = int(lengths.sum())
    proximal = rng.normal(-1, 2, total).astype(np.float32)
    behavior = (proximal + rng.standard_t(1.5, total) * 0.5).astype(np.float32)
    for value in (NAN, INF, -INF, 500.0, -500.0):
        rng.choice([proximal, behavior])[rng.integers(total)] = value
    return pack(proximal, behavior, np.cumsum([0, *lengths]), rng.random(total) < 0.8)


RULES = [
    (statistic, aggregate, *bounds)
    for statistic, bounds in {
        "ratio": (0.5, 3.0), "k1": (0.8, 1.3), "k2": (None, 0.4), "k3": (0.01, 0.5),
    }.items()
    for aggregate in ("token", "sum", "mean", "max")
]  # fmt: skip


@pytest.mark.parametrize("batch", [EDGES, random_batch(0), random_batch(1)])
def test_native_corrections_equal_the_float64_reference(batch):
    exact = to_torch(batch, torch.float64)
    for level in ("token", "sequence", "geometric"):
        for options in ({"bounds": (0.4, 2.0), "outside": "truncate"}, ICEPOP):
            weights = kernels.importance_weights(*batch, level=level, **options)
            defined = reference.importance_weights(*exact, level=level, **options)
            np.testing.assert_allclose(weights, defined.numpy(), rtol=1e-6)
            assert kernels.weight_normalizer(weights, *batch[2:], level=level) == pytest.approx(
                reference.weight_normalizer(defined, *exact[2:], level=level), rel=1e-6
            )
        found = kernels.off_policy_metrics(*batch, level=level, bounds=(None, 2.0))
        defined_metrics = reference.off_policy_metrics(
            *exact, weights=None, rejection_mask=None, level=level, bounds=(None, 2.0)
        )
        assert found == pytest.approx(defined_metrics, rel=1e-6)
    for rule in RULES:
        for compat in (None, "verl"):
            options = {"rules": [rule], "veto": 1e-4, "compat": compat}
            kept = kernels.rejection_mask(*batch, **options)
            np.testing.assert_array_equal(kept, reference.rejection_mask(*exact, **options).numpy())


def test_values_in_masked_tokens_change_no_bit():
    batch = random_batch(2)
    poisoned = [a.copy() for a in batch]
    for values in poisoned[:2]:
        values[~batch[3]] = NAN
    for level in ("token", "sequence"):
        np.testing.assert_array_equal(
            kernels.importance_weights(*batch, level=level),
            kernels.importance_weights(*poisoned, level=level),
        )
    assert kernels.off_policy_metrics(*batch) == kernels.off_policy_metrics(*poisoned)


def test_cpu_tensors_give_the_same_bits_as_their_numpy_arrays():
    batch = random_batch(3)
    weights = kernels.importance_weights(*to_torch(batch), level="sequence")
    assert isinstance(weights, torch.Tensor)
    np.testing.assert_array_equal(
        weights.numpy(), kernels.importance_weights(*batch, level="sequence")
    )
    assert kernels.off_policy_metrics(*to_torch(batch)) == kernels.off_policy_metrics(*batch)


def test_strided_arrays_are_read_by_value_not_by_position():
    batch = pack()
    strided = [np.repeat(batch[0], 2)[::2], batch[1][::-1].copy()[::-1], *batch[2:]]
    np.testing.assert_array_equal(
        kernels.importance_weights(*strided), kernels.importance_weights(*batch)
    )


def test_reduced_precision_tensors_are_corrected_in_float64():
    tensors = to_torch(pack(), torch.bfloat16)
    exact = [t.double() if t.is_floating_point() else t for t in tensors]
    weights = kernels.importance_weights(*tensors, level="sequence")
    assert weights.dtype == torch.float32
    torch.testing.assert_close(
        weights, kernels.importance_weights(*exact, level="sequence").float(), rtol=0, atol=0
    )


@pytest.mark.parametrize("as_given", [lambda r, o: (r, o), lambda r, o: to_torch((r, o))])
@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("grpo", 0.8660239), ("dr_grpo", 0.5), ("rloo", 0.66666667)],
)
def test_group_advantages_equal_the_golden_numbers(as_given, estimator, expected):
    arrays = as_given(np.array([1.0, 0, 0, 1, 7, 3, 3]), np.array([0, 4, 5, 5, 7]))
    advantages = np.asarray(kernels.group_advantages(*arrays, estimator=estimator))
    signs = [1, -1, -1, 1, 0, 0, 0]  # a group of one and a group of equals have no advantage
    np.testing.assert_allclose(advantages, expected * np.array(signs), rtol=1e-6)


def test_rewards_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match=r"rewards\[1\]=nan is not finite"):
        kernels.group_advantages(np.array([1.0, NAN]), np.array([0, 2]))


PPO = ([0.4, 1.5, -0.4, -0.4, NAN, 900.0], [0.0] * 6, [1.0, -1.0, 1.0, -1.0, 1.0, -1.0])


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64])
def test_policy_loss_equals_the_golden_numbers(dtype):
    arrays = [np.array(values, np.float32) for values in PPO]
    result = kernels.policy_loss(
        *(arrays if dtype is None else to_torch(arrays, dtype)), dual_clip=3.0
    )
    np.testing.assert_allclose(
        np.asarray(result.loss), [-1.28, 3.0, -0.67032005, 0.8, 0.0, 3.0], rtol=1e-6
    )
    assert np.asarray(result.is_clipped).tolist() == [True, False, False, True, False, False]
    assert np.asarray(result.is_dual_clipped).tolist() == [False, True, False, False, False, True]


def test_policy_loss_has_no_gradient_where_clipped_and_minus_advantage_times_ratio_elsewhere():
    current = torch.tensor(PPO[0], dtype=torch.float64, requires_grad=True)
    old, advantages = (torch.tensor(v, dtype=torch.float64) for v in PPO[1:])
    kernels.policy_loss(current, old, advantages, dual_clip=3.0).loss.sum().backward()
    expected = torch.tensor([0.0, 0.0, -math.exp(-0.4), 0.0, 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(current.grad, expected)


@pytest.mark.parametrize("as_given", [lambda *a: a, lambda *a: to_torch(a)])
@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [-0.3, 0.3, -25, 25, 0]),
        ("k2", [0.045, 0.045, 312.5, 312.5, 0]),
        ("k3", [0.04985881, 0.04081822, 10, 10, 0]),
    ],
)
def test_kl_penalty_equals_the_golden_numbers(as_given, estimator, expected):
    difference = np.array([0.3, -0.3, 25, -25, -INF], np.float32)
    current, anchor = as_given(np.zeros(5, np.float32), difference)
    penalty = np.asarray(kernels.kl_penalty(current, anchor, estimator=estimator))
    np.testing.assert_allclose(penalty, expected, rtol=1e-6)


@pytest.mark.parametrize("as_given", [lambda *a: a, lambda *a: to_torch(a)])
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_mean", (1 + 2 + 4) / 3),
        ("sequence_mean_token_mean", (1.5 + 4) / 3),
        ("sequence_mean_token_sum", (3 + 4) / 3),
    ],
)
def test_aggregate_divides_trained_losses_by_the_given_denominator(as_given, mode, expected):
    loss, mask, offsets = as_given(
        np.array([1, 2, NAN, 4, INF], np.float32),
        np.array([True, True, False, True, False]),
        np.array([0, 3, 3, 4, 5]),
    )
    result = kernels.aggregate(loss, mask, offsets, mode=mode, denominator=3.0)
    assert float(result) == pytest.approx(expected, rel=1e-6)


def test_token_logprobs_equal_log_softmax_and_its_entropy(monkeypatch):
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 20)  # two rows at a time
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 5, (5, 9)).astype(np.float32)
    logits[1, 3:] = -INF
    logits[2] = 1e4 * np.eye(9, dtype=np.float32)[0]
    tokens = np.array([0, 2, 1, 8, 4])
    p = torch.from_numpy(logits).double().div(0.7).softmax(1)
    chosen = p.log()[range(5), tokens].clamp(min=-20000)
    chosen[2] = -1e4 / 0.7
    entropy = torch.special.entr(p).sum(1)
    for arrays in ((logits, tokens), to_torch((logits, tokens))):
        found = kernels.token_logprobs(*arrays, temperature=0.7)
        np.testing.assert_allclose(np.asarray(found[0]), chosen, rtol=2e-6, atol=1e-6)
        np.testing.assert_allclose(np.asarray(found[1]), entropy, rtol=2e-6, atol=1e-6)


def test_token_logprobs_gradient_is_the_derivative(monkeypatch):
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 14)
    torch.manual_seed(0)
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([0, 6, 3, 3, 1])
    assert torch.autograd.gradcheck(
        lambda x: kernels.token_logprobs(x, tokens, temperature=1.3), (logits,)
    )
    assert torch.autograd.gradcheck(
        lambda x: kernels.token_logprobs(x, tokens, temperature=0.5)[0], (logits,)
    )


def test_token_logprobs_gradient_survives_forbidden_tokens():
    logits = torch.tensor([[0.0, -INF, 1.0]], requires_grad=True)
    logprobs, entropy = kernels.token_logprobs(logits, torch.tensor([0]))
    (logprobs + entropy).sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[0, 1] == 0.0


P, B, BOUNDARIES, M = pack()


@pytest.mark.parametrize("as_given", [lambda a: a, lambda a: to_torch(a, torch.float64)])
@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ((P, B, np.array([0, 4, 7]), M), "offsets must end at T=8, got 7"),
        ((P, B, np.array([1, 4, 8]), M), "offsets must .*start at 0, got .*1"),
        ((P, B, np.array([0, 9, 8]), M), "offsets must not decrease"),
        ((P, B[:7], BOUNDARIES, M), "behavior_logprobs has .*7.*, proximal_logprobs has .*8"),
        ((P, B, BOUNDARIES, M[:2]), "loss_mask has .*2.*, proximal_logprobs has .*8"),
        ((P, B[None], BOUNDARIES, M), r"behavior_logprobs must have 1 dimension\(s\), got 2"),
    ],
)
def test_a_wrong_shape_is_refused_by_name(as_given, arrays, message):
    with pytest.raises(ValueError, match=message):
        kernels.importance_weights(*as_given(arrays))


def test_a_wrong_dtype_or_kind_is_refused_by_name():
    with pytest.raises(TypeError, match="proximal_logprobs must be float32, got float64"):
        kernels.importance_weights(P.astype(np.float64), B, BOUNDARIES, M)
    with pytest.raises(TypeError, match="loss_mask must be bool, got int64"):
        kernels.importance_weights(P, B, BOUNDARIES, M.astype(np.int64))
    with pytest.raises(TypeError, match="offsets must be int64, got torch.int32"):
        kernels.importance_weights(*to_torch((P, B, BOUNDARIES.astype(np.int32), M), torch.float64))
    with pytest.raises(TypeError, match="behavior_logprobs must be a torch tensor like proximal"):
        kernels.importance_weights(torch.from_numpy(P), B, BOUNDARIES, M)
    with pytest.raises(TypeError, match="loss_mask must be a numpy array, got .*list"):
        kernels.importance_weights(P, B, BOUNDARIES, M.tolist())


@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: kernels.importance_weights(*a, level="group"), "level='group' is unknown"),
        (lambda a: kernels.importance_weights(*a, bounds=(2.0, 1.0)), "wrong order"),
        (lambda a: kernels.importance_weights(*a, bounds=(0.0, 1.0)), "weight bound 0"),
        (lambda a: kernels.rejection_mask(*a, rules=[("k4", "sum", None, 1)]), "statistic='k4'"),
        (lambda a: kernels.rejection_mask(*a, rules=[("k1", "all", None, 1)]), "aggregate='all'"),
        (lambda a: kernels.rejection_mask(*a, rules=[("k2", "sum", None, -1.0)]), "k2 bound -1"),
        (lambda a: kernels.rejection_mask(*a, rules=[], veto=-1.0), "veto bound -1"),
        (lambda a: kernels.rejection_mask(*a, rules=[], compat="trl"), "compat='trl'"),
        (lambda a: kernels.aggregate(a[0], a[3], a[2], denominator=0), "denominator=0 must be > 0"),
        (lambda a: kernels.policy_loss(a[0], a[1], a[0], dual_clip=1.0), "dual_clip=1.0 must be"),
    ],
)
def test_an_illegal_option_is_refused_with_its_value(dtype, call, message):
    arrays = pack() if dtype is None else to_torch(pack(), dtype)
    with pytest.raises(ValueError, match=message):
        call(arrays)


def test_a_token_outside_the_vocabulary_is_refused():
    arrays = (np.zeros((2, 5), np.float32), np.array([0, 5]))
    for given in (arrays, to_torch(arrays)):
        with pytest.raises(ValueError, match=r"tokens\[1\]=5 is outside the vocabulary \[0, 5\)"):
            kernels.token_logprobs(*given)


def test_importing_kernels_imports_numpy_alone():
    code = (
        "import sys, asyncrl.kernels, asyncrl.losses;"
        "print(sorted({'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
