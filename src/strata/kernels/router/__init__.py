"""router: from router logits to the experts of each token and their weights.

route(logits_TE, n_active=K, scoring=..., ...) -> (expert_TK int32, weight_TK in the logits' dtype)
    "softmax"       p = softmax over all E; top K; weight = p, divided by their sum when normalize
    "softmax_topk"  top K of the logits; weight = softmax over those K (normalize has no effect)
    "sigmoid"       p = sigmoid(logit); top K of p + correction; weight = p without the correction,
                    divided by (their sum + 1e-20) when normalize
    and finally weight * scale.
    groups (n_groups > 1, "sigmoid" only): experts lie in n_groups equal groups; a group's score is
    the sum of its two best selection scores; only experts of the groups_kept best groups count.
route_rows(logits_TE, rule, bias_E, correction_E, expert_R, weight_R)
    the same of logits + bias into flat buffers; row r is token r // K, rank r % K.
Order: rank 0 has the highest selection score. Ties, of experts or groups, go to the lower index.
Bias: route leaves it to the caller to add it to the logits.

Promise: a token's result has the same bits for every T. NaN logits give NaN weights and valid
expert numbers.
Source: the routers of Qwen3-MoE, Qwen4-Exp, gpt-oss, DeepSeek-V3 and GLM-4-MoE in transformers;
they leave the order of ties open, and DeepSeek's and GLM's the order of ranks.
"""

from strata.kernels.router.ref import RouteRule, Scoring, route, route_rows

__all__ = ["RouteRule", "Scoring", "route", "route_rows"]
