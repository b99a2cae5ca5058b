// Forward values of advantages, losses and log-probs for users without an autograd framework.
//
// Formulas: asyncrl/kernels/reference.py. float32 in and out, float64 in between.
#pragma once

#include <cstdint>
#include <span>

namespace asyncrl {

enum class AdvantageEstimator { kGrpo, kDrGrpo, kRloo };

// rewards, advantages: [S]; group g owns [group_offsets[g], group_offsets[g + 1]).
void group_advantages(std::span<const double> rewards, std::span<const std::int64_t> group_offsets,
                      AdvantageEstimator estimator, std::span<double> advantages);

enum class KlEstimator { kK1, kK2, kK3 };

void kl_penalty(std::span<const float> current, std::span<const float> reference,
                KlEstimator estimator, std::span<float> penalty);

struct ClipRange {
  double low = 0.2;  // ratio is clipped to [1 - low, 1 + high]
  double high = 0.28;
  double dual_clip = 0.0;  // 0 = none
};

struct PolicyLossOutputs {
  std::span<float> loss;            // [T]
  std::span<bool> is_clipped;       // [T]
  std::span<bool> is_dual_clipped;  // [T]
};

void policy_loss(std::span<const float> current, std::span<const float> old,
                 std::span<const float> advantages, const ClipRange& clip,
                 const PolicyLossOutputs& out);

enum class Aggregation { kTokenMean, kSequenceMeanTokenMean, kSequenceMeanTokenSum };

double aggregate(std::span<const float> per_token_loss, std::span<const bool> loss_mask,
                 std::span<const std::int64_t> offsets, Aggregation mode, double denominator);

// logits: [T, V] row-major; tokens in [0, V).
void token_logprobs(std::span<const float> logits, std::span<const std::int64_t> tokens,
                    double temperature, std::span<float> logprobs, std::span<float> entropy);

}  // namespace asyncrl
