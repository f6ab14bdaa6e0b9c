"""Learning rates by hand, and AdamW on masters against torch's on plain parameters."""

import copy
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from paceline.common import footprint
from paceline.common.errors import PacelineError
from paceline.common.runfile import OptimizerSettings
from paceline.consumer import optim
from paceline.consumer.group import GroupError
from paceline.consumer.optim import (
    MasterAdamW,
    MasterMuon,
    MasterOptimizer,
    MasterWeights,
    build_optimizer,
    lr_at,
    orthogonalised,
    same_shapes,
)
from torch import nn

DEFAULTS = OptimizerSettings.model_validate({})


def rates(total=100, **settings):
    chosen = OptimizerSettings.model_validate({"lr": 1.0, "warmup": 0.04, **settings})
    return [lr_at(step, total, chosen) for step in range(total)]


def test_cosine():
    lr = rates(final_lr=0.1)
    assert lr[:4] == [0.25, 0.5, 0.75, 1.0]
    assert lr[51] == pytest.approx(0.1 + 0.9 / 2)
    assert lr[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in itertools.pairwise(lr[3:]))


def test_wsd():
    lr = rates(schedule="wsd", decay=0.2)
    assert set(lr[3:80]) == {1.0}
    assert lr[80] == pytest.approx(0.95)
    assert lr[-1] == 0


def test_constant_without_warmup():
    assert set(rates(schedule="constant", warmup=0)) == {1.0}


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("total", [1, 2, 3])
def test_short_runs_and_steps_past_the_end(schedule, total):
    settings = OptimizerSettings.model_validate({"schedule": schedule, "warmup": 0.9, "decay": 1.0})
    assert all(0 <= lr_at(step, total, settings) <= settings.lr for step in range(total))
    assert lr_at(total + 5, total, settings) == lr_at(total - 1, total, settings)


@pytest.fixture
def module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3, bias=False))


def backward(module, seed, scale=1.0):
    x = torch.randn(7, 6, generator=torch.Generator().manual_seed(seed))
    (scale * module(x.to(next(module.parameters()).dtype)).square().sum()).backward()


def test_equals_torchs_adamw_with_clipping(module):
    plain = copy.deepcopy(module)
    matrices, rest = ([p for p in plain.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
    settings = OptimizerSettings.model_validate({"weight_decay": 0.1, "clip": 0.5})
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )
    weights = MasterWeights(module, dtype=torch.float32, device="cpu")
    optimizer = MasterAdamW(weights, settings)
    for step in range(4):
        for part in range(2):
            backward(module, 2 * step + part)
            backward(plain, 2 * step + part, scale=1 / 3)
        assert all(p.grad is None for p in module.parameters())
        for group in reference.param_groups:
            group["lr"] = 0.01 * (step + 1)
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        reference.step()
        reference.zero_grad()
        assert optimizer.step(0.01 * (step + 1), 3.0) == pytest.approx(float(norm), rel=1e-5)
        assert not weights.gradients.any()
        for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_bfloat16_copies_of_float32_masters(module):
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    weights = MasterWeights(module, dtype=torch.bfloat16, device="cpu")
    optimizer = MasterAdamW(weights, DEFAULTS)
    masters = weights.views(weights.masters)
    assert all(torch.equal(masters[name], tensor) for name, tensor in before.items())
    for step in range(20):  # each moves a weight by 1e-5, far below bfloat16's spacing
        backward(module, step)
        optimizer.step(1e-5, 1.0)
    for name, parameter in module.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, masters[name].bfloat16())
        assert not torch.equal(masters[name], before[name])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_changes_nothing(module, bad):
    weights = MasterWeights(module, dtype=torch.float32, device="cpu")
    optimizer = MasterAdamW(weights, DEFAULTS)
    backward(module, 0)
    optimizer.step(0.1, 1.0)
    before = [weights.masters.clone(), *(t.clone() for t in optimizer.state_dict().values())]
    backward(module, 1)
    weights.gradients[3] = bad
    norm = optimizer.step(0.1, 1.0)
    assert not torch.isfinite(torch.tensor(norm))
    after = [weights.masters, *optimizer.state_dict().values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not weights.gradients.any()


def test_state_comes_back(module):
    other = copy.deepcopy(module)
    one, two = (MasterWeights(m, dtype=torch.float32, device="cpu") for m in (module, other))
    first, second = (MasterAdamW(w, DEFAULTS) for w in (one, two))
    for step in range(3):
        backward(module, step)
        first.step(0.1, 1.0)
    second.load_state_dict({name: tensor.clone() for name, tensor in first.state_dict().items()})
    two.masters.copy_(one.masters)
    for model, optimizer in ((module, first), (other, second)):
        backward(model, 9)
        optimizer.step(0.1, 1.0)
    assert torch.equal(one.masters, two.masters)
    with pytest.raises(PacelineError, match=r"exp_avg\.0\.bias missing; exp_avg\.x unexpected; step: \[2\], not \[\]"):
        state = first.state_dict()
        state["exp_avg.x"] = state.pop("exp_avg.0.bias")
        second.load_state_dict(state | {"step": torch.zeros(2)})


# Muon


MUON = OptimizerSettings.model_validate({"name": "muon", "weight_decay": 0.1})


@pytest.mark.parametrize("shape", [(6, 5), (5, 6), (8, 8), (3, 40)])
def test_orthogonalised_has_singular_values_near_one_and_the_same_directions(shape):
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    matrices[1] = 0
    matrices[2] *= 1e-3
    for matrix, made in zip(matrices, orthogonalised(matrices), strict=True):
        assert made.shape == matrix.shape
        torch.testing.assert_close(orthogonalised(matrix[None])[0], made, rtol=1e-4, atol=1e-5)  # alone as together
        if not matrix.any():
            assert not made.any()
            continue
        values = torch.linalg.svdvals(made)
        assert values.min() > 0.5 and values.max() < 1.3
        u, _, v = torch.linalg.svd(matrix, full_matrices=False)
        core = u.T @ made @ v.T
        assert torch.allclose(core, core.diag().diag(), atol=1e-4)  # the same directions: only the values changed


def test_matrices_of_one_shape_are_taken_together_if_they_are_small(monkeypatch):
    monkeypatch.setattr(optim, "GROUP", 40)
    shapes = {
        f"{i}.{name}": torch.Size(shape)
        for i in range(3)
        for name, shape in (("q", (4, 4)), ("up", (8, 4)), ("fc", (9, 9)))
    }
    groups = same_shapes(shapes)
    assert groups == [["0.q", "1.q"], ["2.q"], ["0.up"], ["1.up"], ["2.up"], ["0.fc"], ["1.fc"], ["2.fc"]]


@pytest.mark.parametrize("group", [1, optim.GROUP])
def test_groups_of_any_size_make_the_same_step(group, monkeypatch):
    alike = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 4))
    stepped = []
    for limit in (group, 36):
        monkeypatch.setattr(optim, "GROUP", limit)
        one = copy.deepcopy(alike)
        weights = MasterWeights(one, dtype=torch.float32, device="cpu")
        optimizer = build_optimizer(weights, MUON)
        one(torch.randn(5, 6, generator=torch.Generator().manual_seed(0))).square().sum().backward()
        optimizer.step(1e-2, 1.0)
        stepped.append(weights.masters.clone())
    torch.testing.assert_close(*stepped, rtol=1e-5, atol=1e-6)


def test_muon_follows_torchs_own_on_matrices_and_adamw_on_vectors(module):
    """torch's iterates in bfloat16, so the weights agree to its rounding."""
    plain = copy.deepcopy(module)
    matrices = [p for p in plain.parameters() if p.ndim > 1]
    vectors = [p for p in plain.parameters() if p.ndim == 1]
    muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(vectors, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    weights = MasterWeights(module, dtype=torch.float32, device="cpu")
    optimizer = build_optimizer(weights, MUON)
    assert isinstance(optimizer, MasterMuon)
    before = [p.detach().clone() for p in plain.parameters()]
    for seed in range(4):
        backward(plain, seed, scale=0.01)
        backward(module, seed, scale=0.01)
        muon.step()
        adamw.step()
        muon.zero_grad()
        adamw.zero_grad()
        optimizer.step(1e-2, 1.0)
    for old, mine, theirs in zip(before, module.parameters(), plain.parameters(), strict=True):
        moved = (theirs - old).norm()
        assert moved > 0 and (mine - theirs).norm() < 0.15 * moved


def member(rank: int, world: int, all_reduce: Callable[[torch.Tensor], None]) -> Any:
    """A rank's view of its group."""
    return SimpleNamespace(rank=rank, world=world, all_reduce=all_reduce)


class Ranks:
    """Each rank of a group in a thread of its own."""

    def __init__(self, world: int) -> None:
        self.world, self._values, self._lock = world, [], threading.Lock()
        self._arrived = threading.Barrier(world, timeout=60)

    def one(self, rank: int) -> Any:
        return member(rank, self.world, self.all_reduce)

    def all_reduce(self, values: torch.Tensor) -> None:
        with self._lock:
            self._values.append(values.clone())
        self._arrived.wait()
        total = torch.stack(self._values).sum(0)
        if self._arrived.wait() == 0:  # all have their total
            self._values = []
        self._arrived.wait()
        values.copy_(total)


def large(seed: int) -> tuple[MasterWeights, MasterOptimizer]:
    layers = [nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4, bias=False), nn.Linear(4, 9)]
    one = nn.Sequential(*layers)
    with torch.no_grad():
        for p in one.parameters():
            p.normal_(generator=torch.Generator().manual_seed(p.numel()))
    weights = MasterWeights(one, dtype=torch.float32, device="cpu")
    weights.gradients.normal_(generator=torch.Generator().manual_seed(seed))
    return weights, build_optimizer(weights, MUON)


@pytest.mark.parametrize("world", [2, 3, 7])
def test_ranks_share_muons_work_and_all_have_the_same(world, monkeypatch):
    monkeypatch.setattr(footprint, "MUON_SHARED", 1)
    done: list[str] = []
    monkeypatch.setattr(optim, "GROUP", 1)
    plain = optim.orthogonalised
    monkeypatch.setattr(optim, "orthogonalised", lambda matrices: (done.append(matrices.shape), plain(matrices))[1])
    ranks, sets = Ranks(world), [large(0) for _ in range(world)]

    def work(rank: int) -> None:
        weights, optimizer = sets[rank]
        for seed in (1, 2, 3):
            optimizer.step(1e-2, 2.0, ranks.one(rank))
            weights.gradients.normal_(generator=torch.Generator().manual_seed(seed))

    with ThreadPoolExecutor(world) as threads:
        for result in [threads.submit(work, rank) for rank in range(world)]:
            result.result()
    assert len(done) == 3 * 4, "each matrix once a step, whatever the number of ranks"
    alone, optimizer = large(0)
    for seed in (1, 2, 3):
        optimizer.step(1e-2, 2.0)
        alone.gradients.normal_(generator=torch.Generator().manual_seed(seed))
    for weights, other in sets:
        assert torch.equal(weights.masters, sets[0][0].masters)
        torch.testing.assert_close(weights.masters, alone.masters)
        for name, value in other.state_dict().items():
            torch.testing.assert_close(value, optimizer.state_dict()[name])


def test_muons_step_is_the_formula_of_its_docstring():
    """Tighter than torch's own can be held to: matrices as they are, then one after another."""
    weights, optimizer = large(0)
    matrices = {name: part for name, part in weights.views(weights.masters.clone()).items() if part.ndim > 1}
    buffers = {name: torch.zeros_like(part) for name, part in matrices.items()}
    keep, lr = MUON.momentum, 1e-2
    for seed in (1, 2, 3):
        weights.gradients.normal_(generator=torch.Generator().manual_seed(seed)).mul_(0.01)
        gradients = {name: part.clone() for name, part in weights.views(weights.gradients).items()}
        assert optimizer.step(lr, 1.0) < MUON.clip, "nothing is clipped"
        for name, matrix in matrices.items():
            gradient, buffer = gradients[name], buffers[name]
            buffer.copy_(keep * buffer + (1 - keep) * gradient)
            update = orthogonalised((gradient + keep * (buffer - gradient))[None])[0]
            matrix.mul_(1 - lr * MUON.weight_decay).sub_(lr * 0.2 * max(matrix.shape) ** 0.5 * update)
    for name, part in weights.views(weights.masters).items():
        if part.ndim > 1:
            torch.testing.assert_close(part, matrices[name], rtol=1e-4, atol=1e-5)


def test_a_small_drafter_is_not_shared():
    weights, optimizer = large(0)
    optimizer.step(1e-2, 1.0, member(0, 2, lambda _: pytest.fail("asked the other")))
    assert not weights.gradients.any()


def test_an_exchange_that_fails_changes_nothing(monkeypatch):
    monkeypatch.setattr(footprint, "MUON_SHARED", 1)

    def gone(_):
        raise GroupError("another rank is gone")

    weights, optimizer = large(0)
    optimizer.step(1e-2, 1.0)
    before = [weights.masters.clone(), *(value.clone() for value in optimizer.state_dict().values())]
    weights.gradients.normal_()
    with pytest.raises(GroupError):
        optimizer.step(1e-2, 1.0, member(1, 2, gone))
    for kept, now in zip(before, [weights.masters, *optimizer.state_dict().values()], strict=True):
        assert torch.equal(kept, now)


def test_ranks_have_like_shares(monkeypatch):
    """Of eight layers of a drafter's shapes."""
    shapes = {"q": (64, 64), "k": (16, 64), "gate": (192, 64), "down": (64, 192)}
    one = nn.ModuleDict(
        {f"{i}{kind}": nn.Linear(b, a, bias=False) for i in range(8) for kind, (a, b) in shapes.items()}
    )
    monkeypatch.setattr(optim, "GROUP", 1)
    optimizer = build_optimizer(MasterWeights(one, dtype=torch.float32, device="cpu"), MUON)
    assert isinstance(optimizer, MasterMuon)
    for world in (2, 3):
        load = [0] * world
        for names, owner in zip(optimizer._groups, optimizer._owners(world), strict=True):
            load[owner] += sum(footprint.muon_flops(*shapes[name.split(".")[0][1:]]) for name in names)
        assert max(load) < 1.1 * min(load)


def test_muon_resumes_exactly(module):
    one, two = module, copy.deepcopy(module)
    weights = [MasterWeights(m, dtype=torch.float32, device="cpu") for m in (one, two)]
    first, second = (build_optimizer(w, MUON) for w in weights)
    for seed in range(3):
        backward(one, seed)
        first.step(1e-2, 1.0)
    state = {name: value.clone() for name, value in first.state_dict().items()}
    assert {name.split(".")[0] for name in state} == {"momentum", "exp_avg", "exp_avg_sq", "step"}
    second.load_state_dict(state)
    weights[1].masters.copy_(weights[0].masters)
    for seed in range(3, 5):
        for m, optimizer in ((one, first), (two, second)):
            backward(m, seed)
            optimizer.step(1e-2, 1.0)
    assert torch.equal(weights[0].masters, weights[1].masters)


def test_the_state_of_another_optimiser_is_refused(module):
    weights = MasterWeights(module, dtype=torch.float32, device="cpu")
    with pytest.raises(PacelineError, match=r"optimiser state does not fit this drafter: exp_avg.* missing"):
        MasterAdamW(weights, DEFAULTS).load_state_dict(build_optimizer(weights, MUON).state_dict())


def test_matrices_side_by_side_are_one_parameter():
    """Its values are theirs, also after an update, and its gradient is added to theirs."""
    module = nn.ParameterDict({n: torch.randn(s) for n, s in (("a", (3, 4)), ("b", (5, 4)), ("c", 4), ("d", (2, 2)))})
    weights = MasterWeights(module, dtype=torch.bfloat16, device="cpu")
    joint = weights.joined(["a", "b"])
    (joint * 2).sum().backward()
    (module["a"] * 3).sum().backward()
    views = weights.views(weights.gradients)
    assert torch.equal(views["a"], torch.full((3, 4), 5.0)) and torch.equal(views["b"], torch.full((5, 4), 2.0))
    assert joint.grad is None and not views["c"].any()
    weights.masters.mul_(2)
    weights.publish()
    assert torch.equal(joint, torch.cat([module["a"], module["b"]]))
    for names in (["b", "a"], ["b", "d"], ["a", "d"]):
        with pytest.raises(ValueError, match="side by side"):
            weights.joined(names)
