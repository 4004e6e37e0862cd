"""Plain torch truth of attention; the contract is in the package docstring."""

from __future__ import annotations

import torch


def _one_token(
    q_Hd: torch.Tensor,
    k_jGd: torch.Tensor,
    v_jGv: torch.Tensor,
    scale: float,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one query over the given keys, [H, dv]."""
    n_heads, n_groups = q_Hd.shape[0], k_jGd.shape[1]
    # BLAS may round by alignment; a fresh copy has the same one wherever the token stands
    q_GMd = q_Hd.clone().view(n_groups, n_heads // n_groups, -1)
    score_Hj = torch.bmm(q_GMd, k_jGd.permute(1, 2, 0)).view(n_heads, -1) * scale
    top_H1 = score_Hj.max(-1, keepdim=True).values
    if sinks_H is not None:
        top_H1 = torch.maximum(top_H1, sinks_H.unsqueeze(-1))
    p_Hj = (score_Hj - top_H1).exp_()
    total_H1 = p_Hj.sum(-1, keepdim=True)
    if sinks_H is not None:
        total_H1 = total_H1 + (sinks_H.unsqueeze(-1) - top_H1).exp()
    p_GMj = (p_Hj / total_H1).view(n_groups, n_heads // n_groups, -1)
    return torch.bmm(p_GMj, v_jGv.permute(1, 0, 2)).view(n_heads, -1)


def attention(
    q_THd: torch.Tensor,
    k_nGd: torch.Tensor,
    v_nGv: torch.Tensor,
    start: int,
    scale: float,
    window_tokens: int | None = None,
    sinks_H: torch.Tensor | None = None,
    selected_Tn: torch.Tensor | None = None,
    out_THv: torch.Tensor | None = None,
) -> torch.Tensor:
    """Every token of the window over the positions it may see, [T, H, dv]."""
    assert len(k_nGd) == len(v_nGv) == start + len(q_THd), "caches end at the window's last token"
    dtype = q_THd.dtype
    k, v = k_nGd.to(dtype), v_nGv.to(dtype)
    sinks = None if sinks_H is None else sinks_H.to(dtype)
    out = out_THv
    if out is None:
        out = q_THd.new_empty(q_THd.shape[0], q_THd.shape[1], v.shape[-1])
    for t in range(q_THd.shape[0]):
        end = start + t + 1
        first = 0 if window_tokens is None else max(0, end - window_tokens)
        k_t, v_t = k[first:end], v[first:end]
        if selected_Tn is not None:
            seen = selected_Tn[t, first:end]
            if not bool(seen.all()):
                index = seen.nonzero().squeeze(-1)
                k_t, v_t = k_t.index_select(0, index), v_t.index_select(0, index)
        out[t] = _one_token(q_THd[t], k_t, v_t, scale, sinks)
    return out
