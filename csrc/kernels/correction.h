// Rollout correction on packed arrays: importance weights, their normaliser, rejection,
// diagnostics.
//
// Formulas: asyncrl/kernels/reference.py. All sums are float64, in token order, so that results do
// not depend on the machine. Decisions compare in log space; log-ratios are clamped to
// +-kMaxLogRatio only inside exp. A token whose log-probs are not both finite is left out of every
// sum. Arguments are checked by the caller.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

namespace asyncrl {

inline constexpr double kMaxLogRatio = 20.0;
inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

// exp that can overflow neither double nor, once stored, float.
inline double bounded_exp(double log_ratio) {
  return std::exp(std::clamp(log_ratio, -kMaxLogRatio, kMaxLogRatio));
}

// T tokens in S sequences one after another; sequence i owns [offsets[i], offsets[i + 1]).
struct PackedLogprobs {
  std::span<const float> proximal;        // [T]
  std::span<const float> behavior;        // [T]
  std::span<const std::int64_t> offsets;  // [S + 1]
  std::span<const bool> loss_mask;        // [T], true = trained
};

enum class Level { kToken, kSequence, kGeometric };
enum class Outside { kTruncate, kZero };

// Inclusive; an absent bound is an infinity (or 0 for a lower bound on a ratio).
struct Bounds {
  double lower = -kInfinity;
  double upper = kInfinity;

  bool contain(double value) const { return lower <= value && value <= upper; }
};

struct WeightRule {
  Level level = Level::kToken;
  Bounds ratio{0.0, kInfinity};
  Outside outside = Outside::kTruncate;
};

void importance_weights(const PackedLogprobs& packed, const WeightRule& rule,
                        std::span<float> weights);

struct SumAndCount {
  double sum = 0.0;
  std::int64_t count = 0;
};

// Token level: sum of weights over trained tokens. Other levels: sum of per-sequence means over the
// sequences that have a trained token.
SumAndCount weight_normalizer(std::span<const float> weights, std::span<const std::int64_t> offsets,
                              std::span<const bool> loss_mask, Level level);

// What is bounded. kLogRatio is log(proximal / behavior); the negated one is verl's k1.
enum class Statistic { kLogRatio, kNegatedLogRatio, kRatio, kK2, kK3 };
enum class Aggregate { kToken, kSum, kMean, kMax };

struct RejectionRule {
  Statistic statistic = Statistic::kLogRatio;
  Aggregate aggregate = Aggregate::kToken;
  Bounds bounds;  // in the statistic's own space
};

struct RejectionOptions {
  std::span<const RejectionRule> rules;
  double veto_log_ratio = -kInfinity;  // a token below it rejects its sequence
  bool clamp_statistics = false;       // verl's: log-ratios are clamped before any statistic
};

// kept[t] = trained, finite and passed by every rule.
void rejection_mask(const PackedLogprobs& packed, const RejectionOptions& options,
                    std::span<bool> kept);

struct OffPolicyMetrics {
  std::int64_t num_nonfinite = 0;
  std::int64_t num_tokens = 0;  // trained and finite; with 0 the fields down to chi2 mean nothing
  double ratio_mean = 0, ratio_max = 0, ratio_min = 0, ratio_p01 = 0, ratio_p50 = 0, ratio_p99 = 0;
  double ratio_fraction_high = 0, ratio_fraction_low = 0;
  double weight_mean = 0, weight_std = 0, ess = 0;
  double kl = 0, k3_kl = 0, chi2_token = 0, chi2_sequence = 0;
  double proximal_ppl = 0, behavior_ppl = 0, proximal_log_ppl = 0, behavior_log_ppl = 0;
  double log_ppl_diff = 0, log_ppl_abs_diff = 0, log_ppl_diff_max = 0, log_ppl_diff_min = 0;
  double ppl_ratio = 0;
  double rejected_token_fraction = 0, rejected_sequence_fraction = 0;
};

// weights: [T], what the weight metrics describe; `kept` may be empty: nothing counts as rejected.
OffPolicyMetrics off_policy_metrics(const PackedLogprobs& packed, Level level, Bounds ratio,
                                    std::span<const float> weights, std::span<const bool> kept);

}  // namespace asyncrl
