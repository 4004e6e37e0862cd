"""Routed experts of made-up models; a matrix is the same whenever it is asked for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strata.formats.mapped import MappedFile
from strata.kernels.expert_rows import layout
from tests.kernels.test_linear import make_weight


@dataclass(frozen=True)
class MadeUpExperts:
    """An ExpertSource. types: (gate, up, down) per layer, None for a layer without experts."""

    d_model: int
    d_expert: int
    n_experts: int
    layer_types: tuple[tuple[str, str, str] | None, ...]
    with_bias: bool = False

    @property
    def layers(self):
        return tuple(i for i, types in enumerate(self.layer_types) if types is not None)

    def types(self, layer):
        return self.layer_types[layer]

    def rows(self, layer, expert, proj):
        return self.weight(layer, expert, proj).data.numpy()

    def weight(self, layer, expert, proj):
        """The matrix as a Weight."""
        rows, cols = self.d_expert, self.d_model
        if proj == "down":
            rows, cols = cols, rows
        i = ("gate", "up", "down").index(proj)
        rng = np.random.default_rng((layer, expert, i))
        return make_weight(self.layer_types[layer][i], rows, cols, rng)

    def bias(self, layer, expert, proj):
        width = self.d_model if proj == "down" else self.d_expert
        return np.full(width, layer + expert / 16, np.float32) if self.with_bias else None

    def scale(self, layer, expert, proj):
        return 1 + expert / 8 + len(proj)

    def tensor_names(self):
        return ()

    def check(self):
        pass

    def shapes(self):
        """The native shape and number of experts per layer."""
        return [
            None
            if types is None
            else (
                layout(
                    self.d_model,
                    self.d_expert,
                    types,
                    bias=self.with_bias,
                    scales="NVFP4" in types,
                ),
                self.n_experts,
            )
            for types in self.layer_types
        ]


class FileExperts(MadeUpExperts):
    """Experts whose rows are views of a mapped file, one after another, as in a checkpoint."""

    def write(self, path):
        """One layer's bytes, repeated for every layer and expert."""
        with open(path, "wb") as stream:
            for layer in self.layers:
                rng = np.random.default_rng(layer)
                d, f = self.d_model, self.d_expert
                shapes = ((f, d), (f, d), (d, f))
                kinds = zip(self.layer_types[layer], shapes, strict=True)
                one = [make_weight(kind, *shape, rng).data.numpy() for kind, shape in kinds]
                for _ in range(self.n_experts):
                    stream.writelines(matrix.tobytes() for matrix in one)
        object.__setattr__(self, "file", MappedFile(path))

    def rows(self, layer, expert, proj):
        sizes = [entry[0].matrix_bytes if entry else (0, 0, 0) for entry in self.shapes()]
        start = sum(sum(s) for s in sizes[:layer]) * self.n_experts + expert * sum(sizes[layer])
        i = ("gate", "up", "down").index(proj)
        raw = self.file.view(start + sum(sizes[layer][:i]), sizes[layer][i])
        return raw.reshape(self.d_model if proj == "down" else self.d_expert, -1)
