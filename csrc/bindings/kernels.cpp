// Python face of csrc/kernels: checks every argument by name, releases the GIL, turns names of
// choices into enums. numpy arrays only; asyncrl/kernels/native.py documents the functions.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/correction.h"
#include "kernels/losses.h"

namespace py = pybind11;
using namespace py::literals;

namespace {

using namespace asyncrl;

using OptionalBounds = std::pair<std::optional<double>, std::optional<double>>;
using RuleTuple =
    std::tuple<std::string, std::string, std::optional<double>, std::optional<double>>;

template <typename... Parts>
[[noreturn]] void value_error(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw py::value_error(message.str());
}

template <typename... Parts>
[[noreturn]] void type_error(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw py::type_error(message.str());
}

// A C-contiguous view (a copy only if the array is strided) whose lifetime covers the call.
template <typename T>
class Input {
 public:
  Input(const py::object& value, std::string_view name, py::ssize_t ndim = 1) {
    if (!py::isinstance<py::array>(value)) {
      type_error(name, " must be a numpy array, got ", py::str(py::type::of(value)));
    }
    if (!py::isinstance<py::array_t<T>>(value)) {
      type_error(name, " must be ", py::str(py::dtype::of<T>()), ", got ",
                 py::str(py::array(value).dtype()), "; convert it with .astype");
    }
    array_ = py::array_t<T, py::array::c_style | py::array::forcecast>(value);
    if (array_.ndim() != ndim) {
      value_error(name, " must have ", ndim, " dimension(s), got ", array_.ndim());
    }
  }

  std::span<const T> span() const {
    return {array_.data(), static_cast<std::size_t>(array_.size())};
  }
  std::int64_t size() const { return array_.size(); }
  std::int64_t shape(int dimension) const { return array_.shape(dimension); }

 private:
  py::array_t<T, py::array::c_style | py::array::forcecast> array_;
};

template <typename T>
std::span<T> writable(py::array_t<T>& array) {
  return {array.mutable_data(), static_cast<std::size_t>(array.size())};
}

void check_size(std::string_view name, std::int64_t size, std::string_view like,
                std::int64_t expected) {
  if (size != expected) {
    value_error(name, " has ", size, " elements, ", like, " has ", expected,
                "; they must be equal");
  }
}

void check_offsets(std::string_view name, const Input<std::int64_t>& offsets, std::int64_t end,
                   std::string_view symbol) {
  const auto span = offsets.span();
  if (span.empty() || span.front() != 0) {
    value_error(name, " must start at 0, got ",
                span.empty() ? "an empty array" : std::to_string(span.front()));
  }
  for (std::size_t i = 0; i + 1 < span.size(); ++i) {
    if (span[i + 1] < span[i]) {
      value_error(name, " must not decrease, got ", name, "[", i, "]=", span[i], " and ", name, "[",
                  i + 1, "]=", span[i + 1]);
    }
  }
  if (span.back() != end) {
    value_error(name, " must end at ", symbol, "=", end, ", got ", span.back());
  }
}

template <typename Enum>
Enum choice(std::string_view name, const std::string& value,
            std::initializer_list<std::pair<std::string_view, Enum>> legal) {
  std::ostringstream names;
  for (const auto& [text, result] : legal) {
    if (text == value) return result;
    names << (names.tellp() > 0 ? ", " : "") << text;
  }
  value_error(name, "='", value, "' is unknown; legal: ", names.str());
}

Level parse_level(const std::string& level) {
  return choice<Level>(
      "level", level,
      {{"token", Level::kToken}, {"sequence", Level::kSequence}, {"geometric", Level::kGeometric}});
}

// Bounds on a ratio (> 0) or on a divergence (>= 0), inclusive.
Bounds parse_bounds(std::string_view name, const OptionalBounds& bounds, bool is_ratio) {
  for (const auto& bound : {bounds.first, bounds.second}) {
    if (bound && !(std::isfinite(*bound) && (is_ratio ? *bound > 0 : *bound >= 0))) {
      value_error(name, " bound ", *bound, " is not legal: finite and ", is_ratio ? "> 0" : ">= 0",
                  ", or None for no bound");
    }
  }
  const Bounds parsed{bounds.first.value_or(0.0), bounds.second.value_or(kInfinity)};
  if (parsed.lower > parsed.upper) {
    value_error(name, " bounds (", parsed.lower, ", ", parsed.upper,
                ") are in the wrong order: lower first");
  }
  return parsed;
}

RejectionRule parse_rule(const RuleTuple& rule, bool is_verl) {
  const auto& [statistic_name, aggregate_name, lower, upper] = rule;
  RejectionRule parsed;
  parsed.statistic =
      choice<Statistic>("statistic", statistic_name,
                        {{"ratio", Statistic::kRatio},
                         {"k1", is_verl ? Statistic::kNegatedLogRatio : Statistic::kLogRatio},
                         {"k2", Statistic::kK2},
                         {"k3", Statistic::kK3}});
  parsed.aggregate = choice<Aggregate>("aggregate", aggregate_name,
                                       {{"token", Aggregate::kToken},
                                        {"sum", Aggregate::kSum},
                                        {"mean", Aggregate::kMean},
                                        {"max", Aggregate::kMax}});
  const bool is_ratio = parsed.statistic != Statistic::kK2 && parsed.statistic != Statistic::kK3;
  parsed.bounds = parse_bounds(statistic_name, {lower, upper}, is_ratio);
  const bool is_monotone =
      parsed.aggregate == Aggregate::kToken || parsed.aggregate == Aggregate::kMax;
  if (parsed.statistic == Statistic::kRatio && is_monotone) {
    parsed.statistic = Statistic::kLogRatio;
  }
  if (is_ratio && parsed.statistic != Statistic::kRatio) {
    parsed.bounds = {std::log(parsed.bounds.lower), std::log(parsed.bounds.upper)};
  }
  return parsed;
}

struct PackedInputs {
  Input<float> proximal;
  Input<float> behavior;
  Input<std::int64_t> offsets;
  Input<bool> loss_mask;

  PackedInputs(const py::object& proximal_logprobs, const py::object& behavior_logprobs,
               const py::object& offsets_array, const py::object& mask)
      : proximal(proximal_logprobs, "proximal_logprobs"),
        behavior(behavior_logprobs, "behavior_logprobs"),
        offsets(offsets_array, "offsets"),
        loss_mask(mask, "loss_mask") {
    check_size("behavior_logprobs", behavior.size(), "proximal_logprobs", proximal.size());
    check_size("loss_mask", loss_mask.size(), "proximal_logprobs", proximal.size());
    check_offsets("offsets", offsets, proximal.size(), "T");
  }

  PackedLogprobs packed() const {
    return {proximal.span(), behavior.span(), offsets.span(), loss_mask.span()};
  }
};

py::array_t<float> importance_weights_py(const py::object& proximal, const py::object& behavior,
                                         const py::object& offsets, const py::object& loss_mask,
                                         const std::string& level, const OptionalBounds& bounds,
                                         const std::string& outside) {
  const PackedInputs inputs(proximal, behavior, offsets, loss_mask);
  const WeightRule rule{
      parse_level(level), parse_bounds("weight", bounds, true),
      choice<Outside>("outside", outside,
                      {{"truncate", Outside::kTruncate}, {"zero", Outside::kZero}})};
  py::array_t<float> weights(inputs.proximal.size());
  const auto out = writable(weights);
  const py::gil_scoped_release release;
  importance_weights(inputs.packed(), rule, out);
  return weights;
}

std::pair<double, std::int64_t> weight_normalizer_py(const py::object& weights,
                                                     const py::object& offsets,
                                                     const py::object& loss_mask,
                                                     const std::string& level) {
  const Input<float> w(weights, "weights");
  const Input<std::int64_t> o(offsets, "offsets");
  const Input<bool> mask(loss_mask, "loss_mask");
  check_size("loss_mask", mask.size(), "weights", w.size());
  check_offsets("offsets", o, w.size(), "T");
  const auto total = weight_normalizer(w.span(), o.span(), mask.span(), parse_level(level));
  return {total.sum, total.count};
}

py::array_t<bool> rejection_mask_py(const py::object& proximal, const py::object& behavior,
                                    const py::object& offsets, const py::object& loss_mask,
                                    const std::vector<RuleTuple>& rules, std::optional<double> veto,
                                    const std::optional<std::string>& compat) {
  const PackedInputs inputs(proximal, behavior, offsets, loss_mask);
  const bool is_verl = compat && choice<bool>("compat", *compat, {{"verl", true}});
  std::vector<RejectionRule> parsed;
  for (const RuleTuple& rule : rules) parsed.push_back(parse_rule(rule, is_verl));
  const Bounds veto_bounds = parse_bounds("veto", {veto, std::nullopt}, true);
  const RejectionOptions options{parsed, std::log(veto_bounds.lower), is_verl};
  py::array_t<bool> kept(inputs.proximal.size());
  const auto out = writable(kept);
  const py::gil_scoped_release release;
  rejection_mask(inputs.packed(), options, out);
  return kept;
}

py::dict metrics_dict(const OffPolicyMetrics& m, bool has_kept) {
  py::dict out;
  const auto add = [&out](const char* name, double value) {
    out[py::str(std::string("correction/") + name)] = value;
  };
  add("num_nonfinite", static_cast<double>(m.num_nonfinite));
  add("num_tokens", static_cast<double>(m.num_tokens));
  if (has_kept) {
    add("rejected_token_fraction", m.rejected_token_fraction);
    add("rejected_sequence_fraction", m.rejected_sequence_fraction);
  }
  if (m.num_tokens == 0) return out;
  add("ratio_mean", m.ratio_mean);
  add("ratio_max", m.ratio_max);
  add("ratio_min", m.ratio_min);
  add("ratio_p01", m.ratio_p01);
  add("ratio_p50", m.ratio_p50);
  add("ratio_p99", m.ratio_p99);
  add("ratio_fraction_high", m.ratio_fraction_high);
  add("ratio_fraction_low", m.ratio_fraction_low);
  add("weight_mean", m.weight_mean);
  add("weight_std", m.weight_std);
  add("ess", m.ess);
  add("kl", m.kl);
  add("k3_kl", m.k3_kl);
  add("chi2_token", m.chi2_token);
  add("chi2_sequence", m.chi2_sequence);
  add("proximal_ppl", m.proximal_ppl);
  add("behavior_ppl", m.behavior_ppl);
  add("proximal_log_ppl", m.proximal_log_ppl);
  add("behavior_log_ppl", m.behavior_log_ppl);
  add("log_ppl_diff", m.log_ppl_diff);
  add("log_ppl_abs_diff", m.log_ppl_abs_diff);
  add("log_ppl_diff_max", m.log_ppl_diff_max);
  add("log_ppl_diff_min", m.log_ppl_diff_min);
  add("ppl_ratio", m.ppl_ratio);
  return out;
}

py::dict off_policy_metrics_py(const py::object& proximal, const py::object& behavior,
                               const py::object& offsets, const py::object& loss_mask,
                               const py::object& weights, const py::object& kept,
                               const std::string& level, const OptionalBounds& bounds) {
  const PackedInputs inputs(proximal, behavior, offsets, loss_mask);
  const Input<float> w(weights, "weights");
  check_size("weights", w.size(), "proximal_logprobs", inputs.proximal.size());
  std::optional<Input<bool>> mask;
  if (!kept.is_none()) {
    mask.emplace(kept, "rejection_mask");
    check_size("rejection_mask", mask->size(), "proximal_logprobs", inputs.proximal.size());
  }
  const Bounds ratio = parse_bounds("ratio", bounds, true);
  const Level parsed_level = parse_level(level);
  OffPolicyMetrics metrics;
  {
    const py::gil_scoped_release release;
    metrics = off_policy_metrics(inputs.packed(), parsed_level, ratio, w.span(),
                                 mask ? mask->span() : std::span<const bool>());
  }
  return metrics_dict(metrics, mask.has_value());
}

py::array_t<double> group_advantages_py(const py::object& rewards, const py::object& group_offsets,
                                        const std::string& estimator) {
  const Input<double> r(rewards, "rewards");
  const Input<std::int64_t> offsets(group_offsets, "group_offsets");
  check_offsets("group_offsets", offsets, r.size(), "S");
  for (std::size_t i = 0; i < r.span().size(); ++i) {
    if (!std::isfinite(r.span()[i])) {
      value_error("rewards[", i, "]=", r.span()[i], " is not finite; the reward function must be");
    }
  }
  const auto parsed = choice<AdvantageEstimator>("estimator", estimator,
                                                 {{"grpo", AdvantageEstimator::kGrpo},
                                                  {"dr_grpo", AdvantageEstimator::kDrGrpo},
                                                  {"rloo", AdvantageEstimator::kRloo}});
  py::array_t<double> advantages(r.size());
  group_advantages(r.span(), offsets.span(), parsed, writable(advantages));
  return advantages;
}

py::array_t<float> kl_penalty_py(const py::object& current, const py::object& reference,
                                 const std::string& estimator) {
  const Input<float> c(current, "current_logprobs");
  const Input<float> r(reference, "reference_logprobs");
  check_size("reference_logprobs", r.size(), "current_logprobs", c.size());
  const auto parsed = choice<KlEstimator>(
      "estimator", estimator,
      {{"k1", KlEstimator::kK1}, {"k2", KlEstimator::kK2}, {"k3", KlEstimator::kK3}});
  py::array_t<float> penalty(c.size());
  const auto out = writable(penalty);
  const py::gil_scoped_release release;
  kl_penalty(c.span(), r.span(), parsed, out);
  return penalty;
}

py::tuple policy_loss_py(const py::object& current, const py::object& old,
                         const py::object& advantages, double clip_low, double clip_high,
                         std::optional<double> dual_clip) {
  const Input<float> c(current, "current_logprobs");
  const Input<float> o(old, "anchor_logprobs");
  const Input<float> a(advantages, "advantages");
  check_size("anchor_logprobs", o.size(), "current_logprobs", c.size());
  check_size("advantages", a.size(), "current_logprobs", c.size());
  py::array_t<float> loss(c.size());
  py::array_t<bool> is_clipped(c.size());
  py::array_t<bool> is_dual_clipped(c.size());
  const PolicyLossOutputs out{writable(loss), writable(is_clipped), writable(is_dual_clipped)};
  {
    const py::gil_scoped_release release;
    policy_loss(c.span(), o.span(), a.span(), {clip_low, clip_high, dual_clip.value_or(0.0)}, out);
  }
  return py::make_tuple(loss, is_clipped, is_dual_clipped);
}

double aggregate_py(const py::object& per_token_loss, const py::object& loss_mask,
                    const py::object& offsets, const std::string& mode, double denominator) {
  const Input<float> loss(per_token_loss, "per_token_loss");
  const Input<bool> mask(loss_mask, "loss_mask");
  const Input<std::int64_t> o(offsets, "offsets");
  check_size("loss_mask", mask.size(), "per_token_loss", loss.size());
  check_offsets("offsets", o, loss.size(), "T");
  const auto parsed =
      choice<Aggregation>("mode", mode,
                          {{"token_mean", Aggregation::kTokenMean},
                           {"sequence_mean_token_mean", Aggregation::kSequenceMeanTokenMean},
                           {"sequence_mean_token_sum", Aggregation::kSequenceMeanTokenSum}});
  return aggregate(loss.span(), mask.span(), o.span(), parsed, denominator);
}

py::tuple token_logprobs_py(const py::object& logits, const py::object& tokens,
                            double temperature) {
  const Input<float> x(logits, "logits", 2);
  const Input<std::int64_t> ids(tokens, "tokens");
  check_size("tokens", ids.size(), "logits (rows)", x.shape(0));
  for (std::size_t t = 0; t < ids.span().size(); ++t) {
    if (ids.span()[t] < 0 || ids.span()[t] >= x.shape(1)) {
      value_error("tokens[", t, "]=", ids.span()[t], " is outside the vocabulary [0, ", x.shape(1),
                  ")");
    }
  }
  py::array_t<float> logprobs(ids.size());
  py::array_t<float> entropy(ids.size());
  const auto logprobs_out = writable(logprobs);
  const auto entropy_out = writable(entropy);
  {
    const py::gil_scoped_release release;
    token_logprobs(x.span(), ids.span(), temperature, logprobs_out, entropy_out);
  }
  return py::make_tuple(logprobs, entropy);
}

}  // namespace

PYBIND11_MODULE(_kernels, m) {
  m.doc() = "C++ kernels of asyncrl.kernels; use that module, which documents them.";
  m.def("importance_weights", &importance_weights_py, "proximal_logprobs"_a, "behavior_logprobs"_a,
        "offsets"_a, "loss_mask"_a, py::kw_only(), "level"_a, "bounds"_a, "outside"_a);
  m.def("weight_normalizer", &weight_normalizer_py, "weights"_a, "offsets"_a, "loss_mask"_a,
        py::kw_only(), "level"_a);
  m.def("rejection_mask", &rejection_mask_py, "proximal_logprobs"_a, "behavior_logprobs"_a,
        "offsets"_a, "loss_mask"_a, py::kw_only(), "rules"_a, "veto"_a, "compat"_a);
  m.def("off_policy_metrics", &off_policy_metrics_py, "proximal_logprobs"_a, "behavior_logprobs"_a,
        "offsets"_a, "loss_mask"_a, py::kw_only(), "weights"_a, "rejection_mask"_a, "level"_a,
        "bounds"_a);
  m.def("group_advantages", &group_advantages_py, "rewards"_a, "group_offsets"_a, py::kw_only(),
        "estimator"_a);
  m.def("kl_penalty", &kl_penalty_py, "current_logprobs"_a, "reference_logprobs"_a, py::kw_only(),
        "estimator"_a);
  m.def("policy_loss", &policy_loss_py, "current_logprobs"_a, "anchor_logprobs"_a, "advantages"_a,
        py::kw_only(), "clip_low"_a, "clip_high"_a, "dual_clip"_a);
  m.def("aggregate", &aggregate_py, "per_token_loss"_a, "loss_mask"_a, "offsets"_a, py::kw_only(),
        "mode"_a, "denominator"_a);
  m.def("token_logprobs", &token_logprobs_py, "logits"_a, "tokens"_a, py::kw_only(),
        "temperature"_a);
}
