"""The device's plan against make_plan in NumPy with the rules of experts/."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from strata.core.types import Place
from strata.experts.late import late_rule
from strata.experts.link_part import fixed_share
from strata.experts.pcie_share import pcie_rule
from strata.experts.tail_skip import tail_rule
from strata.kernels.plan import Plan, make_plan
from strata.kernels.plan import triton as gpu
from strata.kernels.router.triton import route
from strata.kernels.words import Payload, payload_ints, read_payload


@dataclass
class GpuGroups:
    """What kernels/expert_rows takes."""

    addr: torch.Tensor
    start: torch.Tensor
    entry_row: torch.Tensor
    entry_token: torch.Tensor
    n_groups: torch.Tensor


@dataclass
class Outputs:
    """Everything that a plan writes, poisoned with -9."""

    place: torch.Tensor
    gpu: GpuGroups
    counts: torch.Tensor
    ints: torch.Tensor
    scratch: gpu.PlanScratch

    def all(self, **more: object) -> tuple[object, ...]:
        """The last arguments of a plan."""
        n = len(self.place)
        host = gpu.ForHost(self.counts, self.ints.data_ptr(), n, **more)  # type: ignore[arg-type]
        return self.place, self.gpu, host, self.scratch

    def payload(self) -> Payload:
        """What the host reads."""
        assert self.scratch.said.count_nonzero() == 0 and self.scratch.arrived.item() == 0
        return read_payload(self.ints.cpu().numpy(), len(self.place))


def outputs(n: int, d: torch.device) -> Outputs:
    """For n rows of up to 16 experts."""

    def ints(n: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full((n,), -9, dtype=dtype, device=d)

    groups = GpuGroups(ints(n, torch.int64), ints(n + 1), ints(n), ints(n), ints(1))
    scratch = gpu.new_scratch(16, d)
    return Outputs(ints(n, torch.int8), groups, ints(5), ints(payload_ints(n)), scratch)


def rules(moved: tuple[int, ...], below: float, tail_rank: int, d: torch.device) -> gpu.PlanRules:
    return gpu.PlanRules(
        torch.tensor(moved, dtype=torch.int32, device=d),
        torch.tensor([below], dtype=torch.float32, device=d),
        torch.tensor([tail_rank], dtype=torch.int32, device=d),
    )


def check(plan: Plan, address: dict[Place, np.ndarray], out: Outputs) -> None:
    """The device's arrays hold the groups of both places of each device one after the other."""
    on_gpu, cpu = out.gpu, out.payload()
    assert out.place.tolist() == plan.place_R.tolist()
    sides = [((Place.FAST, Place.PCIE), on_gpu.start, on_gpu.entry_row, on_gpu.entry_token)]
    if out.counts[4] > 0:
        sides.append(((Place.CPU, Place.CPU_LATE), cpu.start, cpu.row, cpu.token))
    for places, start, row, token in sides:
        found = [plan.groups[p] for p in places if p in plan.groups]
        rows = [int(r) for groups in found for r in groups.row]
        assert row[: len(rows)].tolist() == rows
        assert token[: len(rows)].tolist() == [int(t) for g in found for t in g.token]
        sizes = [int(n) for groups in found for n in np.diff(groups.start)]
        starts = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
        padded = np.concatenate([starts, np.full(len(start) - len(starts), starts[-1])])
        assert start.tolist() == padded.tolist()
    wanted = [
        int(address[p][e]) for p in (Place.FAST, Place.PCIE) if p in plan.groups
        for e in plan.groups[p].expert_G
    ]  # fmt: skip
    assert on_gpu.n_groups.tolist() == [len(wanted)]
    assert on_gpu.addr[: len(wanted)].tolist() == wanted
    experts = [
        int(e) for p in (Place.CPU, Place.CPU_LATE) if p in plan.groups
        for e in plan.groups[p].expert_G
    ]  # fmt: skip
    if experts:
        assert cpu.expert.tolist() == experts
    counts = []
    for p in (Place.CPU, Place.CPU_LATE):
        groups = plan.groups.get(p)
        counts += [0, 0] if groups is None else [len(groups.expert_G), groups.n_rows]
    assert out.counts.tolist() == [*counts, len(experts)]
    assert not experts or list(cpu.counts) == counts


def addresses(rng: np.random.Generator, n_experts: int) -> dict[Place, np.ndarray]:
    """Far beyond 32 bits, as real ones are."""
    numbers = (np.arange(n_experts, dtype=np.int64) + 1) * 4096 + (1 << 46)
    return {
        Place.FAST: np.where(rng.random(n_experts) < 0.3, numbers, 0),
        Place.PCIE: np.where(rng.random(n_experts) < 0.8, numbers + (1 << 45), 0),
    }


@pytest.mark.parametrize("seed", range(12))
def test_equals_make_plan(triton_device: torch.device, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n_tokens = (1, 8, 1)[seed] if seed < 3 else int(rng.integers(2, 8))
    n_active, n_experts = int(rng.integers(1, 7)), 12
    expert = np.concatenate([rng.permutation(n_experts)[:n_active] for _ in range(n_tokens)])
    expert = expert.astype(np.int32)
    weight = np.sort(rng.random((n_tokens, n_active)))[:, ::-1].reshape(-1).astype(np.float32)
    address = addresses(rng, n_experts)
    # by a share, and any numbers
    drawn = tuple(int(rng.integers(0, n + 1)) for n in range(1, len(expert) + 4))
    moved = (fixed_share(77, len(expert)), fixed_share(256, 99), drawn)[seed % 3]
    below = float(np.float32(rng.choice([-1.0, 0.2, np.inf])))
    tail_rank = int(rng.choice([0, 3]))
    numpy_rules = [tail_rule(tail_rank)] if tail_rank > 0 else []
    numpy_rules.append(pcie_rule(moved, lambda layer: address[Place.PCIE]))
    if below >= 0:
        numpy_rules.append(late_rule([5], None if below == np.inf else below))
    plan = make_plan(5, expert, weight, n_active, address[Place.FAST], numpy_rules)
    d = triton_device
    out = outputs(len(expert), d)
    tables = [torch.from_numpy(address[p]).to(d) for p in (Place.FAST, Place.PCIE)]
    gpu.make_plan(
        torch.from_numpy(expert).to(d), torch.from_numpy(weight).to(d), n_active, *tables,
        rules(moved, below, tail_rank, d), *out.all(),
    )  # fmt: skip
    check(plan, address, out)


def test_routing_in_the_same_launch(triton_device: torch.device) -> None:
    """Experts and weights as by the routing kernel alone; the plan is that of make_plan; the host
    gets the activations."""
    d, n_active = triton_device, 3
    logits = torch.randn(2, 8, generator=torch.Generator().manual_seed(0)).to(d)
    rule = {"scoring": "softmax", "normalize": True}
    expert = torch.empty(6, dtype=torch.int32, device=d)
    weight = torch.empty(6, device=d)
    route(logits, expert, weight, n_active=n_active, **rule)
    address = addresses(np.random.default_rng(1), 8)
    tables = [torch.from_numpy(address[p]).to(d) for p in (Place.FAST, Place.PCIE)]
    out = outputs(6, d)
    expert_2, weight_2 = torch.empty_like(expert), torch.empty_like(weight)
    x, x_out = torch.randn(2, 40).to(d), torch.full((96,), -9.0, device=d)
    more = out.all(x_TD=x, x=x_out.data_ptr())
    half = fixed_share(128, 6)
    gpu.route_and_plan(
        logits, expert_2, weight_2, *tables, rules(half, -1.0, 0, d), *more, n_active=n_active,
        **rule,
    )  # fmt: skip
    assert torch.equal(x_out[:80].view(2, 40), x) and (x_out[80:] == -9).all()
    assert torch.equal(expert_2, expert)
    assert torch.equal(weight_2, weight)
    share = [pcie_rule(half, lambda layer: address[Place.PCIE])]
    numbers = expert.cpu().numpy(), weight.cpu().numpy()
    check(make_plan(0, *numbers, n_active, address[Place.FAST], share), address, out)
