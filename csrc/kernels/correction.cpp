#include "kernels/correction.h"

namespace asyncrl {
namespace {

struct LogRatio {
  double value;
  bool is_valid;
};

LogRatio log_ratio(const PackedLogprobs& packed, std::int64_t t) {
  const double proximal = packed.proximal[t];
  const double behavior = packed.behavior[t];
  const bool is_finite = std::isfinite(proximal) && std::isfinite(behavior);
  return {proximal - behavior, packed.loss_mask[t] && is_finite};
}

SumAndCount sum_log_ratios(const PackedLogprobs& packed, std::int64_t begin, std::int64_t end) {
  SumAndCount total;
  for (std::int64_t t = begin; t < end; ++t) {
    const LogRatio d = log_ratio(packed, t);
    total.sum += d.is_valid ? d.value : 0.0;
    total.count += d.is_valid;
  }
  return total;
}

double bounded_weight(double log_weight, const WeightRule& rule, const Bounds& log_bounds) {
  const bool truncates = rule.outside == Outside::kTruncate;
  if (log_weight > log_bounds.upper) return truncates ? rule.ratio.upper : 0.0;
  if (log_weight < log_bounds.lower) return truncates ? rule.ratio.lower : 0.0;
  return bounded_exp(log_weight);
}

double statistic_of(double d, Statistic statistic) {
  switch (statistic) {
    case Statistic::kLogRatio:
      return d;
    case Statistic::kNegatedLogRatio:
      return -d;
    case Statistic::kRatio:
      return bounded_exp(d);
    case Statistic::kK2:
      return 0.5 * d * d;
    case Statistic::kK3:
      return std::expm1(std::clamp(d, -kMaxLogRatio, kMaxLogRatio)) - d;
  }
  return 0.0;
}

double clamped_if(bool clamps, double d) {
  return clamps ? std::clamp(d, -kMaxLogRatio, kMaxLogRatio) : d;
}

double aggregate_of(const PackedLogprobs& packed, std::int64_t begin, std::int64_t end,
                    const RejectionRule& rule, bool clamps) {
  double sum = 0.0;
  double max = -kInfinity;
  std::int64_t count = 0;
  for (std::int64_t t = begin; t < end; ++t) {
    const LogRatio d = log_ratio(packed, t);
    if (!d.is_valid) continue;
    const double x = statistic_of(clamped_if(clamps, d.value), rule.statistic);
    sum += x;
    max = std::max(max, x);
    ++count;
  }
  if (rule.aggregate == Aggregate::kMax) return max;
  return rule.aggregate == Aggregate::kMean ? sum / static_cast<double>(count) : sum;
}

void apply_rule(const PackedLogprobs& packed, std::int64_t begin, std::int64_t end,
                const RejectionRule& rule, bool clamps, std::span<bool> kept) {
  if (rule.aggregate == Aggregate::kToken) {
    for (std::int64_t t = begin; t < end; ++t) {
      const double d = clamped_if(clamps, log_ratio(packed, t).value);
      kept[t] = kept[t] && rule.bounds.contain(statistic_of(d, rule.statistic));
    }
  } else if (!rule.bounds.contain(aggregate_of(packed, begin, end, rule, clamps))) {
    std::fill(kept.begin() + begin, kept.begin() + end, false);
  }
}

}  // namespace

void importance_weights(const PackedLogprobs& packed, const WeightRule& rule,
                        std::span<float> weights) {
  const Bounds log_bounds{std::log(rule.ratio.lower), std::log(rule.ratio.upper)};
  for (std::size_t i = 0; i + 1 < packed.offsets.size(); ++i) {
    const std::int64_t begin = packed.offsets[i];
    const std::int64_t end = packed.offsets[i + 1];
    if (rule.level == Level::kToken) {
      for (std::int64_t t = begin; t < end; ++t) {
        const LogRatio d = log_ratio(packed, t);
        weights[t] = d.is_valid ? static_cast<float>(bounded_weight(d.value, rule, log_bounds)) : 0;
      }
      continue;
    }
    const SumAndCount total = sum_log_ratios(packed, begin, end);
    const double divisor = rule.level == Level::kGeometric ? static_cast<double>(total.count) : 1.0;
    const double weight =
        total.count > 0 ? bounded_weight(total.sum / divisor, rule, log_bounds) : 0.0;
    for (std::int64_t t = begin; t < end; ++t) {
      weights[t] = log_ratio(packed, t).is_valid ? static_cast<float>(weight) : 0.0F;
    }
  }
}

SumAndCount weight_normalizer(std::span<const float> weights, std::span<const std::int64_t> offsets,
                              std::span<const bool> loss_mask, Level level) {
  SumAndCount total;
  for (std::size_t i = 0; i + 1 < offsets.size(); ++i) {
    SumAndCount sequence;
    for (std::int64_t t = offsets[i]; t < offsets[i + 1]; ++t) {
      sequence.sum += loss_mask[t] ? weights[t] : 0.0F;
      sequence.count += loss_mask[t];
    }
    if (sequence.count == 0) continue;
    const bool is_token = level == Level::kToken;
    total.sum += is_token ? sequence.sum : sequence.sum / static_cast<double>(sequence.count);
    total.count += is_token ? sequence.count : 1;
  }
  return total;
}

void rejection_mask(const PackedLogprobs& packed, const RejectionOptions& options,
                    std::span<bool> kept) {
  for (std::size_t i = 0; i + 1 < packed.offsets.size(); ++i) {
    const std::int64_t begin = packed.offsets[i];
    const std::int64_t end = packed.offsets[i + 1];
    bool has_valid = false;
    bool is_vetoed = false;
    for (std::int64_t t = begin; t < end; ++t) {
      const LogRatio d = log_ratio(packed, t);
      kept[t] = d.is_valid;
      has_valid = has_valid || d.is_valid;
      is_vetoed = is_vetoed || (d.is_valid && d.value < options.veto_log_ratio);
    }
    if (!has_valid) continue;
    if (is_vetoed) std::fill(kept.begin() + begin, kept.begin() + end, false);
    for (const RejectionRule& rule : options.rules) {
      apply_rule(packed, begin, end, rule, options.clamp_statistics, kept);
    }
  }
}

}  // namespace asyncrl
