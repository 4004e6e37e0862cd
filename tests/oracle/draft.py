"""The draft (multi-token prediction) layer of qwen4_exp as its serving engines state it.

One block-selecting decoder layer between a stream-wise fusion of its inputs and a stream mixer of
its own; embedding and head are the trunk's. transformers ignores the mtp.* tensors.
"""

from __future__ import annotations

import copy
from typing import Any

import torch


class Draft(torch.nn.Module):
    """config: the trunk's; modeling: transformers' module of the family."""

    def __init__(self, config: Any, modeling: Any) -> None:
        super().__init__()
        own = copy.deepcopy(config)
        own.num_hidden_layers, own.layer_types, own.ple_layer_ids = 1, ["indexed_attention"], []
        own._attn_implementation = "eager"
        self.streams, self.width = own.hc_count, own.hidden_size
        norm = modeling.Qwen4ExpTextRMSNorm
        self.pre_fc_norm_embedding = norm(self.width, eps=own.rms_norm_eps)
        self.pre_fc_norm_hidden = norm(self.streams * self.width, eps=own.rms_norm_eps)
        self.fc_embedding = torch.nn.Linear(self.width, self.width, bias=False)
        self.fc_hidden = torch.nn.Linear(self.width, self.width, bias=False)
        self.layers = torch.nn.ModuleList([modeling.Qwen4ExpTextDecoderLayer(own, 0)])
        self.hyper_connection_mixer = modeling.Qwen4ExpTextGatedResidual(own, use_combine=False)

    def run(self, trunk: Any, next_ids: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
        """Logits [T, V] of the token after next_ids [1, T]; streams: the trunk's [1, T, C * D]."""
        embedded = self.pre_fc_norm_embedding(trunk.model.embed_tokens(next_ids))
        hidden = self.pre_fc_norm_hidden(streams).unflatten(-1, (self.streams, self.width))
        x = self.fc_embedding(embedded).unsqueeze(-2) + self.fc_hidden(hidden)
        x, n = x.flatten(-2), next_ids.shape[1]
        positions = torch.arange(n).view(1, 1, -1).expand(3, 1, -1)
        rotary = trunk.model.rotary_emb(x, positions)
        mask = torch.full((1, 1, n, n), torch.finfo(torch.float32).min).triu(1)
        y = self.layers[0](x, position_embeddings=rotary, attention_mask=mask, cache=None)
        logits: torch.Tensor = trunk.lm_head(self.hyper_connection_mixer(y))[0]
        return logits
