#include <vector>

#include "kernels/correction.h"

namespace asyncrl {
namespace {

struct Sequence {
  double sum = 0.0;  // of log-ratios
  double proximal = 0.0;
  double behavior = 0.0;
  std::int64_t count = 0;
};

double mean(double sum, std::int64_t count) { return sum / static_cast<double>(count); }

// Linear interpolation between order statistics, in ratio space. Reorders `log_ratios`.
double ratio_quantile(std::vector<double>& log_ratios, double q) {
  const double position = q * static_cast<double>(log_ratios.size() - 1);
  const auto index = static_cast<std::ptrdiff_t>(position);
  const auto low = log_ratios.begin() + index;
  std::nth_element(log_ratios.begin(), low, log_ratios.end());
  const double below = bounded_exp(*low);
  const double rest = position - static_cast<double>(index);
  if (rest == 0.0) return below;
  return below + rest * (bounded_exp(*std::min_element(low + 1, log_ratios.end())) - below);
}

void describe_ratios(std::vector<double>& log_ratios, Bounds ratio, OffPolicyMetrics& out) {
  const double log_upper = std::log(ratio.upper);
  const double log_lower = ratio.lower > 0.0 ? std::log(ratio.lower) : -log_upper;
  const auto count = static_cast<std::int64_t>(log_ratios.size());
  std::int64_t num_high = 0;
  std::int64_t num_low = 0;
  double sum = 0.0;
  for (const double d : log_ratios) {
    sum += bounded_exp(d);
    num_high += d > log_upper;
    num_low += d < log_lower;
  }
  const auto [min, max] = std::minmax_element(log_ratios.begin(), log_ratios.end());
  out.ratio_mean = mean(sum, count);
  out.ratio_min = bounded_exp(*min);
  out.ratio_max = bounded_exp(*max);
  out.ratio_fraction_high = mean(static_cast<double>(num_high), count);
  out.ratio_fraction_low = mean(static_cast<double>(num_low), count);
  out.ratio_p01 = ratio_quantile(log_ratios, 0.01);
  out.ratio_p50 = ratio_quantile(log_ratios, 0.50);
  out.ratio_p99 = ratio_quantile(log_ratios, 0.99);
}

void describe_weights(const std::vector<double>& weights, OffPolicyMetrics& out) {
  double sum = 0.0;
  double squares = 0.0;
  for (const double w : weights) {
    sum += w;
    squares += w * w;
  }
  const auto count = static_cast<std::int64_t>(weights.size());
  out.weight_mean = mean(sum, count);
  out.weight_std =
      std::sqrt(std::max(0.0, mean(squares, count) - out.weight_mean * out.weight_mean));
  out.ess = squares > 0.0 ? sum * sum / (static_cast<double>(count) * squares) : 0.0;
}

void describe_sequences(const std::vector<Sequence>& sequences, OffPolicyMetrics& out) {
  out.log_ppl_diff_max = -kInfinity;
  out.log_ppl_diff_min = kInfinity;
  for (const Sequence& s : sequences) {
    const double proximal = mean(s.proximal, s.count);
    const double behavior = mean(s.behavior, s.count);
    const double diff = behavior - proximal;
    const double ratio = bounded_exp(s.sum);
    out.proximal_log_ppl -= proximal;
    out.behavior_log_ppl -= behavior;
    out.proximal_ppl += bounded_exp(-proximal);
    out.behavior_ppl += bounded_exp(-behavior);
    out.log_ppl_diff += diff;
    out.log_ppl_abs_diff += std::abs(diff);
    out.log_ppl_diff_max = std::max(out.log_ppl_diff_max, diff);
    out.log_ppl_diff_min = std::min(out.log_ppl_diff_min, diff);
    out.ppl_ratio += bounded_exp(diff);
    out.chi2_sequence += ratio * ratio;
  }
  const auto count = static_cast<double>(sequences.size());
  for (double* sum :
       {&out.proximal_log_ppl, &out.behavior_log_ppl, &out.proximal_ppl, &out.behavior_ppl,
        &out.log_ppl_diff, &out.log_ppl_abs_diff, &out.ppl_ratio, &out.chi2_sequence}) {
    *sum /= count;
  }
  out.chi2_sequence -= 1.0;
}

void count_rejected(const PackedLogprobs& packed, std::span<const bool> kept,
                    OffPolicyMetrics& out) {
  std::int64_t tokens = 0, rejected_tokens = 0, sequences = 0, rejected_sequences = 0;
  for (std::size_t i = 0; i + 1 < packed.offsets.size(); ++i) {
    std::int64_t trained = 0, rejected = 0;
    for (std::int64_t t = packed.offsets[i]; t < packed.offsets[i + 1]; ++t) {
      trained += packed.loss_mask[t];
      rejected += packed.loss_mask[t] && !kept[t];
    }
    tokens += trained;
    rejected_tokens += rejected;
    sequences += trained > 0;
    rejected_sequences += rejected > 0;
  }
  if (tokens == 0) return;
  out.rejected_token_fraction = mean(static_cast<double>(rejected_tokens), tokens);
  out.rejected_sequence_fraction = mean(static_cast<double>(rejected_sequences), sequences);
}

}  // namespace

OffPolicyMetrics off_policy_metrics(const PackedLogprobs& packed, Level level, Bounds ratio,
                                    std::span<const float> weights, std::span<const bool> kept) {
  OffPolicyMetrics out;
  std::vector<double> log_ratios;  // one a token, or one a sequence with a valid token
  std::vector<double> used_weights;
  std::vector<Sequence> sequences;
  double k1 = 0.0, k3 = 0.0, squares = 0.0;
  for (std::size_t i = 0; i + 1 < packed.offsets.size(); ++i) {
    Sequence sequence;
    for (std::int64_t t = packed.offsets[i]; t < packed.offsets[i + 1]; ++t) {
      if (!packed.loss_mask[t]) continue;
      const double proximal = packed.proximal[t];
      const double behavior = packed.behavior[t];
      if (!std::isfinite(proximal) || !std::isfinite(behavior)) {
        ++out.num_nonfinite;
        continue;
      }
      const double d = proximal - behavior;
      const double r = bounded_exp(d);
      k1 -= d;
      k3 += std::expm1(std::clamp(d, -kMaxLogRatio, kMaxLogRatio)) - d;
      squares += r * r;
      sequence.sum += d;
      sequence.proximal += proximal;
      sequence.behavior += behavior;
      ++sequence.count;
      if (level == Level::kToken) log_ratios.push_back(d);
      used_weights.push_back(weights[t]);
    }
    if (sequence.count == 0) continue;
    sequences.push_back(sequence);
    out.num_tokens += sequence.count;
    if (level == Level::kSequence) log_ratios.push_back(sequence.sum);
    if (level == Level::kGeometric) log_ratios.push_back(mean(sequence.sum, sequence.count));
  }
  if (!kept.empty()) count_rejected(packed, kept, out);
  if (out.num_tokens == 0) return out;
  out.kl = mean(k1, out.num_tokens);
  out.k3_kl = mean(k3, out.num_tokens);
  out.chi2_token = mean(squares, out.num_tokens) - 1.0;
  describe_weights(used_weights, out);
  describe_sequences(sequences, out);
  describe_ratios(log_ratios, ratio, out);
  return out;
}

}  // namespace asyncrl
