"""The clipped loss against hand-computed values and gradients."""

import dataclasses
import math

import pytest
import torch
from pydantic import ValidationError

from asyncrl.losses import LossInputs, clipped

NAN, INF = math.nan, math.inf


def make_inputs(current, **fields):
    defaults = {
        "anchor_logprobs": torch.zeros(5, dtype=torch.float64),
        "advantages": torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0], dtype=torch.float64),
        "loss_mask": torch.tensor([True, True, True, True, False]),
        "offsets": torch.tensor([0, 3, 5]),
        "denominator": 4.0,
    }
    values = torch.tensor(current, dtype=torch.float64, requires_grad=True)
    return LossInputs(current_logprobs=values, **(defaults | fields))


GOLDEN = [0.4, 1.5, -0.4, -0.4, 2.0]


def gradient(inputs):
    output = clipped.loss(inputs, clipped.Config())
    (grad,) = torch.autograd.grad(output.loss, inputs.current_logprobs)
    return output, grad


def test_loss_and_fractions_equal_the_golden_numbers():
    output, _ = gradient(make_inputs(GOLDEN))
    assert output.loss.item() == pytest.approx(0.46241999, rel=1e-7)
    assert output.metrics == pytest.approx(
        {
            "trainer/num_trained_tokens": 4,
            "trainer/num_nonfinite": 0,
            "trainer/clip_fraction": 0.5,
            "trainer/dual_clip_fraction": 0.25,
            "trainer/anchor_kl": -0.275,
        }
    )


def test_gradient_is_minus_weighted_advantage_times_ratio_where_nothing_clips():
    weights = torch.tensor([2.0, 0.5, 1.0, 0.0, 9.0], dtype=torch.float64)
    inputs = make_inputs([0.1, 0.2, -0.1, 0.0, 0.0], weights=weights)
    _, grad = gradient(inputs)
    expected = [-2 * math.exp(0.1) / 4, 0.5 * math.exp(0.2) / 4, -math.exp(-0.1) / 4, 0.0, 0.0]
    torch.testing.assert_close(grad, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize(
    "aggregation", ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"]
)
def test_gradient_is_the_derivative_of_the_loss(estimator, aggregation):
    inputs = make_inputs(
        [0.1, 0.9, -0.5, -0.1, 0.3],
        weights=torch.tensor([2.0, 0.5, 1.0, 0.7, 9.0], dtype=torch.float64),
        reference_logprobs=torch.tensor([0.0, 0.3, -0.2, 0.1, 0.0], dtype=torch.float64),
        kl_coefficient=0.1,
        kl_estimator=estimator,
    )
    config = clipped.Config(aggregation=aggregation)

    def function(current):
        return clipped.loss(dataclasses.replace(inputs, current_logprobs=current), config).loss

    assert torch.autograd.gradcheck(function, (inputs.current_logprobs,))


def test_kl_penalty_adds_its_coefficient_times_the_mean():
    anchor = torch.tensor([0.4, 1.5, -0.1, -0.4, NAN], dtype=torch.float64)  # differs once, by 0.3
    inputs = make_inputs(GOLDEN, reference_logprobs=anchor, kl_coefficient=2.0)
    output, _ = gradient(inputs)
    kl = 0.04985881 / 4
    assert output.loss.item() == pytest.approx(0.46241999 + 2.0 * kl, rel=1e-7)
    assert output.metrics["trainer/reference_kl"] == pytest.approx(kl, rel=1e-6)


@pytest.mark.parametrize("poison", [NAN, INF, -INF, 1e30])
def test_a_masked_token_changes_neither_loss_nor_gradient(poison):
    wild = {
        name: torch.tensor([0.0, 0.0, 0.0, 0.0, poison], dtype=torch.float64)
        for name in ("anchor_logprobs", "reference_logprobs")
    }
    plain = make_inputs(GOLDEN, weights=torch.ones(5), reference_logprobs=torch.zeros(5))
    advantages = plain.advantages.clone()
    weights = torch.ones(5)
    advantages[4] = weights[4] = poison
    poisoned = make_inputs([*GOLDEN[:4], poison], advantages=advantages, weights=weights, **wild)
    with torch.autograd.set_detect_anomaly(True):  # raises on a NaN anywhere in the backward pass
        output, grad = gradient(poisoned)
    expected, expected_grad = gradient(plain)
    assert torch.equal(output.loss, expected.loss)
    assert output.metrics == expected.metrics
    assert torch.equal(grad, expected_grad)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_nonfinite_trained_token_is_counted_and_has_no_gradient(value):
    output, grad = gradient(make_inputs([0.1, value, -0.1, 0.0, 0.0]))
    assert output.metrics["trainer/num_nonfinite"] == 1
    assert output.metrics["trainer/num_trained_tokens"] == 3
    assert grad[1] == 0.0
    assert torch.isfinite(grad).all()
    assert torch.isfinite(output.loss)


@pytest.mark.parametrize("value", [1000.0, -1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_extreme_ratio_leaves_loss_and_gradient_finite(value, dtype):
    inputs = make_inputs(GOLDEN)
    current = torch.full((5,), value, dtype=dtype, requires_grad=True)
    output, grad = gradient(dataclasses.replace(inputs, current_logprobs=current))
    assert torch.isfinite(output.loss)
    assert torch.isfinite(grad).all()


def test_splitting_a_mini_batch_does_not_change_the_loss():
    whole, _ = gradient(make_inputs(GOLDEN))
    parts = []
    for part in (slice(0, 3), slice(3, 5)):
        full = make_inputs(GOLDEN)
        length = part.stop - part.start
        parts.append(
            LossInputs(
                current_logprobs=full.current_logprobs[part],
                anchor_logprobs=full.anchor_logprobs[part],
                advantages=full.advantages[part],
                loss_mask=full.loss_mask[part],
                offsets=torch.tensor([0, length]),
                denominator=4.0,
            )
        )
    total = sum(clipped.loss(inputs, clipped.Config()).loss for inputs in parts)
    torch.testing.assert_close(total, whole.loss)


def test_a_dual_clip_of_one_or_an_unknown_key_is_refused():
    with pytest.raises(ValidationError, match="dual_clip"):
        clipped.Config(dual_clip=1.0)
    with pytest.raises(ValidationError, match="clip_hihg"):
        clipped.Config(clip_hihg=0.3)
