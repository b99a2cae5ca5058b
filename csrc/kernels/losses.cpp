#include "kernels/losses.h"

#include <algorithm>
#include <cmath>

#include "kernels/correction.h"

namespace asyncrl {
namespace {

constexpr double kStdEpsilon = 1e-6;
constexpr double kMaxK3 = 10.0;

double unbiased_std(std::span<const double> values, double mean) {
  double squares = 0.0;
  for (const double value : values) squares += (value - mean) * (value - mean);
  return std::sqrt(squares / static_cast<double>(values.size() - 1));
}

double kl_term(double current, double reference, KlEstimator estimator) {
  const double x = current - reference;
  switch (estimator) {
    case KlEstimator::kK1:
      return x;
    case KlEstimator::kK2:
      return 0.5 * x * x;
    case KlEstimator::kK3: {
      const double y = std::clamp(-x, -kMaxLogRatio, kMaxLogRatio);
      return std::min(std::expm1(y) - y, kMaxK3);
    }
  }
  return 0.0;
}

}  // namespace

void group_advantages(std::span<const double> rewards, std::span<const std::int64_t> group_offsets,
                      AdvantageEstimator estimator, std::span<double> advantages) {
  for (std::size_t g = 0; g + 1 < group_offsets.size(); ++g) {
    const auto begin = static_cast<std::size_t>(group_offsets[g]);
    const auto n = static_cast<std::size_t>(group_offsets[g + 1]) - begin;
    const std::span<const double> group = rewards.subspan(begin, n);
    double mean = 0.0;
    for (const double reward : group) mean += reward;
    mean /= static_cast<double>(n);
    double scale = 1.0;  // a group of one is centred to 0
    if (n > 1 && estimator == AdvantageEstimator::kGrpo) {
      scale = 1.0 / (unbiased_std(group, mean) + kStdEpsilon);
    } else if (n > 1 && estimator == AdvantageEstimator::kRloo) {
      scale = static_cast<double>(n) / static_cast<double>(n - 1);
    }
    for (std::size_t i = 0; i < n; ++i) advantages[begin + i] = (group[i] - mean) * scale;
  }
}

void kl_penalty(std::span<const float> current, std::span<const float> reference,
                KlEstimator estimator, std::span<float> penalty) {
  for (std::size_t t = 0; t < penalty.size(); ++t) {
    const bool is_finite = std::isfinite(current[t]) && std::isfinite(reference[t]);
    penalty[t] =
        is_finite ? static_cast<float>(kl_term(current[t], reference[t], estimator)) : 0.0F;
  }
}

void policy_loss(std::span<const float> current, std::span<const float> old,
                 std::span<const float> advantages, const ClipRange& clip,
                 const PolicyLossOutputs& out) {
  for (std::size_t t = 0; t < out.loss.size(); ++t) {
    const bool is_finite = std::isfinite(current[t]) && std::isfinite(old[t]);
    const double ratio = bounded_exp(static_cast<double>(current[t]) - old[t]);
    const double advantage = advantages[t];
    const double unclipped = -advantage * ratio;
    const double clipped = -advantage * std::clamp(ratio, 1.0 - clip.low, 1.0 + clip.high);
    const double loss = clipped > unclipped ? clipped : unclipped;
    const double cap = -advantage * clip.dual_clip;
    const bool is_capped = clip.dual_clip > 0.0 && advantage < 0.0 && loss > cap;
    out.loss[t] = is_finite ? static_cast<float>(is_capped ? cap : loss) : 0.0F;
    out.is_clipped[t] = is_finite && clipped > unclipped;
    out.is_dual_clipped[t] = is_finite && is_capped;
  }
}

double aggregate(std::span<const float> per_token_loss, std::span<const bool> loss_mask,
                 std::span<const std::int64_t> offsets, Aggregation mode, double denominator) {
  double total = 0.0;
  for (std::size_t i = 0; i + 1 < offsets.size(); ++i) {
    double sum = 0.0;
    std::int64_t count = 0;
    for (std::int64_t t = offsets[i]; t < offsets[i + 1]; ++t) {
      sum += loss_mask[t] ? per_token_loss[t] : 0.0F;
      count += loss_mask[t];
    }
    const bool averages = mode == Aggregation::kSequenceMeanTokenMean && count > 0;
    total += averages ? sum / static_cast<double>(count) : sum;
  }
  return total / denominator;
}

void token_logprobs(std::span<const float> logits, std::span<const std::int64_t> tokens,
                    double temperature, std::span<float> logprobs, std::span<float> entropy) {
  const std::size_t vocabulary = tokens.empty() ? 0 : logits.size() / tokens.size();
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    const std::span<const float> row = logits.subspan(t * vocabulary, vocabulary);
    const double max = *std::max_element(row.begin(), row.end());
    double sum = 0.0;
    double weighted = 0.0;
    for (const float logit : row) {
      const double z = (logit - max) / temperature;
      const double e = std::exp(z);
      sum += e;
      weighted += z == -kInfinity ? 0.0 : e * z;  // 0 * -inf is 0 here: p log p -> 0
    }
    const double log_sum = std::log(sum);
    logprobs[t] = static_cast<float>((row[tokens[t]] - max) / temperature - log_sum);
    entropy[t] = static_cast<float>(log_sum - weighted / sum);
  }
}

}  // namespace asyncrl
