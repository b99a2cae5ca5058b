// Runs every kernel on wild and on empty batches, for the sanitizers, and checks hand-computed
// values; the full comparison with the definition is tests/unit/test_kernels.py.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <vector>

#include "kernels/correction.h"
#include "kernels/losses.h"

namespace {

using namespace asyncrl;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                \
    }                                                                              \
  } while (false)

bool is_near(double a, double b) { return std::abs(a - b) <= 1e-6 * std::max(1.0, std::abs(b)); }

struct Batch {
  std::vector<float> proximal;
  std::vector<float> behavior;
  std::vector<std::int64_t> offsets;
  std::unique_ptr<bool[]> mask;  // vector<bool> has no bool elements

  Batch(std::vector<float> p, std::vector<float> b, std::vector<std::int64_t> o)
      : proximal(std::move(p)),
        behavior(std::move(b)),
        offsets(std::move(o)),
        mask(std::make_unique<bool[]>(proximal.size())) {
    for (std::size_t t = 0; t < size(); ++t) mask[t] = true;
  }
  std::size_t size() const { return proximal.size(); }
  std::span<const bool> loss_mask() const { return {mask.get(), size()}; }
  PackedLogprobs packed() const { return {proximal, behavior, offsets, loss_mask()}; }
};

Batch golden() {
  Batch batch({-1.0F, -0.5F, -2.0F, -0.1F, -0.3F, -1.2F, -0.7F, -9.0F},
              {-1.2F, -0.4F, -1.5F, -0.1F, -0.35F, -0.9F, -2.9F, -1.0F}, {0, 4, 8});
  batch.mask[7] = false;
  return batch;
}

Batch wild() {
  return Batch({kNan, -kInf, kInf, -1.0F, 1000.0F, -1000.0F, 3e38F, 0.0F},
               {0.0F, 0.0F, 0.0F, -kInf, 0.0F, 0.0F, -3e38F, 0.0F}, {0, 0, 4, 7, 8, 8});
}

std::vector<float> weights_of(const Batch& batch, const WeightRule& rule) {
  std::vector<float> weights(batch.size());
  importance_weights(batch.packed(), rule, weights);
  return weights;
}

void sequence_weights_are_truncated_products() {
  const Batch batch = golden();
  const auto weights = weights_of(batch, {Level::kSequence, {0.0, 2.0}, Outside::kTruncate});
  CHECK(is_near(weights[0], 0.67032005));
  CHECK(is_near(weights[6], 2.0));
  CHECK(weights[7] == 0.0F);
  const SumAndCount total =
      weight_normalizer(weights, batch.offsets, batch.loss_mask(), Level::kSequence);
  CHECK(is_near(total.sum / static_cast<double>(total.count), 1.33516002));
}

void wild_tokens_leave_every_weight_finite() {
  for (const Level level : {Level::kToken, Level::kSequence, Level::kGeometric}) {
    for (const Outside outside : {Outside::kTruncate, Outside::kZero}) {
      const auto weights = weights_of(wild(), {level, {0.0, 2.0}, outside});
      for (std::size_t t = 0; t < weights.size(); ++t) {
        CHECK(std::isfinite(weights[t]));
        CHECK(t >= 4 || weights[t] == 0.0F);
      }
      CHECK(weights[7] == 1.0F);
    }
  }
}

void every_rule_keeps_finite_tokens_only() {
  const Batch batch = wild();
  const auto kept = std::make_unique<bool[]>(batch.size());
  for (const Statistic statistic : {Statistic::kLogRatio, Statistic::kNegatedLogRatio,
                                    Statistic::kRatio, Statistic::kK2, Statistic::kK3}) {
    for (const Aggregate aggregate :
         {Aggregate::kToken, Aggregate::kSum, Aggregate::kMean, Aggregate::kMax}) {
      for (const bool clamps : {false, true}) {
        const RejectionRule rule{statistic, aggregate, {-1.0, 1.0}};
        rejection_mask(batch.packed(), {{&rule, 1}, std::log(1e-4), clamps},
                       {kept.get(), batch.size()});
        for (std::size_t t = 0; t < 7; ++t) CHECK(!kept[t]);
        CHECK(kept[7]);
      }
    }
  }
}

void metrics_equal_hand_computed_values() {
  const Batch batch = golden();
  const auto weights = weights_of(batch, {Level::kToken, {0.0, 2.0}, Outside::kTruncate});
  const OffPolicyMetrics m =
      off_policy_metrics(batch.packed(), Level::kToken, {0.0, 2.0}, weights, batch.loss_mask());
  CHECK(is_near(m.ess, 0.86677161));
  CHECK(is_near(m.k3_kl, 0.85712481));
  CHECK(is_near(m.chi2_sequence, 23.92588903));
  CHECK(m.rejected_token_fraction == 0.0);
  const Batch rough = wild();
  for (const Level level : {Level::kToken, Level::kSequence, Level::kGeometric}) {
    const auto raw = weights_of(rough, {level, {0.0, kInfinity}, Outside::kTruncate});
    const OffPolicyMetrics w = off_policy_metrics(rough.packed(), level, {0.0, 2.0}, raw, {});
    CHECK(w.num_nonfinite == 4);
    CHECK(std::isfinite(w.ratio_p99) && std::isfinite(w.k3_kl) && std::isfinite(w.chi2_sequence));
  }
}

void an_empty_batch_is_legal() {
  const Batch batch({}, {}, {0});
  CHECK(weights_of(batch, {}).empty());
  CHECK(off_policy_metrics(batch.packed(), Level::kToken, {0.0, 2.0}, {}, {}).num_tokens == 0);
  CHECK(aggregate({}, {}, batch.offsets, Aggregation::kTokenMean, 1.0) == 0.0);
  token_logprobs({}, {}, 1.0, {}, {});
  group_advantages({}, batch.offsets, AdvantageEstimator::kGrpo, {});
}

void advantages_and_losses_equal_hand_computed_values() {
  const std::vector<double> rewards{1, 0, 0, 1, 5};
  const std::vector<std::int64_t> groups{0, 4, 4, 5};
  std::vector<double> advantages(5);
  group_advantages(rewards, groups, AdvantageEstimator::kGrpo, advantages);
  CHECK(is_near(advantages[0], 0.8660239) && advantages[4] == 0.0);

  const std::vector<float> log_ratios{0.4F, 1.5F, -0.4F, -0.4F, kNan, 1e30F};
  const std::vector<float> zeros(6);
  const std::vector<float> signs{1, -1, 1, -1, 1, -1};
  std::vector<float> loss(6);
  bool clipped[6];
  bool dual_clipped[6];
  policy_loss(log_ratios, zeros, signs, {0.2, 0.28, 3.0}, {loss, clipped, dual_clipped});
  CHECK(is_near(loss[0], -1.28) && clipped[0] && is_near(loss[1], 3.0) && dual_clipped[1]);
  CHECK(is_near(loss[2], -0.67032005) && is_near(loss[3], 0.8) && loss[4] == 0.0F);
  CHECK(loss[5] == 3.0F);

  kl_penalty(log_ratios, zeros, KlEstimator::kK3, loss);
  CHECK(is_near(loss[2], std::exp(0.4) - 1.4) && loss[4] == 0.0F && std::isfinite(loss[5]));
}

void logprobs_survive_forbidden_tokens() {
  const std::vector<float> logits{0.0F, -kInf, 0.0F, 1e30F, 0.0F, 0.0F};
  const std::vector<std::int64_t> tokens{2, 0};
  std::vector<float> logprobs(2);
  std::vector<float> entropy(2);
  token_logprobs(logits, tokens, 1.0, logprobs, entropy);
  CHECK(is_near(logprobs[0], -std::log(2.0)) && is_near(entropy[0], std::log(2.0)));
  CHECK(logprobs[1] == 0.0F && entropy[1] == 0.0F);
}

}  // namespace

int main() {
  sequence_weights_are_truncated_products();
  wild_tokens_leave_every_weight_finite();
  every_rule_keeps_finite_tokens_only();
  metrics_equal_hand_computed_values();
  an_empty_batch_is_legal();
  advantages_and_losses_equal_hand_computed_values();
  logprobs_survive_forbidden_tokens();
  return 0;
}
