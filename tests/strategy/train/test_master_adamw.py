"""AdamW over fp32 masters: nothing small is lost, nothing sick is applied, and a saved one goes on in the same bits."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples
from safetensors.torch import load_file
from torch import Tensor, nn

from roll.config.errors import UserError
from roll.config.schema import TrainConfig
from roll.model.shard_loading import SafeFolder
from roll.strategy.train.optimizer import MasterAdamW, learning_rate

DTYPES = [torch.float32, torch.bfloat16]


class Net(nn.Module):
    """A matrix, a vector and a scalar; a gradient is set by the loss's own slope."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.matrix = nn.Parameter(torch.randn(3, 4, generator=generator).to(dtype))
        self.vector = nn.Parameter(torch.randn(4, generator=generator).to(dtype))
        self.frozen = nn.Parameter(torch.ones(2).to(dtype), requires_grad=False)

    def push(self, slope: float) -> None:
        ((self.matrix.sum() + self.vector.sum()) * slope).backward()

    def push_randomly(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        loss = sum((p * torch.randn(p.shape, generator=generator).to(p)).sum() for p in (self.matrix, self.vector))
        assert isinstance(loss, Tensor)
        loss.backward()


def bits(net: nn.Module) -> list[list[float]]:
    return [p.detach().float().flatten().tolist() for p in net.parameters()]


def test_updates_too_small_for_bf16_add_up() -> None:
    net = Net(torch.bfloat16)
    with torch.no_grad():
        net.matrix.fill_(1.0)
    storage = net.matrix.data_ptr()
    optimizer = MasterAdamW(net, TrainConfig(lr=1e-4, clip_grad_norm=1e9))
    # bf16 numbers just below 1 are 2^-8 apart: a single update of 1e-4 leaves no trace.
    assert torch.tensor(1.0 - 1e-4, dtype=torch.bfloat16) == 1.0
    seen = set()
    for step in range(200):
        net.push(1.0)
        optimizer.step(step)
        seen.add(net.matrix[0, 0].item())
    assert net.matrix.dtype == torch.bfloat16
    assert net.matrix.data_ptr() == storage
    assert len(seen) > 3
    assert float(net.matrix.detach().float().sub(1 - 200 * 1e-4).abs().max()) <= 2**-8


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_bf16_parameters_are_the_rounded_course_of_fp32_ones(weight_decay: float) -> None:
    config = TrainConfig(lr=1e-2, weight_decay=weight_decay)
    low, full = Net(torch.bfloat16), Net(torch.bfloat16).float()
    optimizers = [MasterAdamW(low, config), MasterAdamW(full, config)]
    for step in range(10):
        slope = (1.0, -0.5, 2.0)[step % 3]  # exact in bf16
        for net, optimizer in zip((low, full), optimizers, strict=True):
            net.push(slope)
            optimizer.step(step)
        for one, other in zip(low.parameters(), full.parameters(), strict=True):
            assert torch.equal(one, other.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_micro_batches_are_summed_in_fp32(dtype: torch.dtype) -> None:
    net = nn.Module()
    net.weight = nn.Parameter(torch.ones(1, dtype=dtype))
    optimizer = MasterAdamW(net, TrainConfig())
    # In bf16, 256 + 1 is 256 again.
    assert torch.tensor(256.0, dtype=torch.bfloat16) + 1 == 256
    for slope in (256.0, *[1.0] * 100):
        (net.weight * slope).sum().backward()
    assert optimizer.step(0).norm == 356.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slope", [math.nan, math.inf, -math.inf])
def test_a_sick_gradient_changes_nothing(dtype: torch.dtype, slope: float) -> None:
    config = TrainConfig(lr=0.1, weight_decay=0.1)
    net, healthy = Net(dtype), Net(dtype)
    optimizer, other = MasterAdamW(net, config), MasterAdamW(healthy, config)
    for step in range(2):
        for one, steps in ((net, optimizer), (healthy, other)):
            one.push_randomly(step)
            steps.step(step)
    net.push(slope)
    net.push_randomly(7)
    sick = optimizer.step(2)
    assert not sick.applied
    assert not math.isfinite(sick.norm)
    assert sick.nonfinite == ("matrix", "vector")
    assert bits(net) == bits(healthy)
    # The moments are as they were too, and nothing of the sick gradient is left.
    for one, steps in ((net, optimizer), (healthy, other)):
        one.push_randomly(3)
        assert steps.step(3).applied
    assert bits(net) == bits(healthy)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_can_be_thrown_away(dtype: torch.dtype) -> None:
    net, fresh = Net(dtype), Net(dtype)
    optimizer, other = MasterAdamW(net, TrainConfig(lr=0.1)), MasterAdamW(fresh, TrainConfig(lr=0.1))
    net.push(5.0)
    optimizer.zero_grad()
    for one, steps in ((net, optimizer), (fresh, other)):
        one.push_randomly(0)
        steps.step(0)
    assert bits(net) == bits(fresh)


def test_the_norm_is_reported_before_clipping_and_the_update_is_clipped() -> None:
    for slope in (1.0, 300.0):
        net = nn.Module()
        net.weight = nn.Parameter(torch.zeros(4))
        optimizer = MasterAdamW(net, TrainConfig(lr=1.0, eps=1.0, clip_grad_norm=1.0))
        (net.weight * slope).sum().backward()
        assert optimizer.step(0).norm == pytest.approx(2 * slope)
        # Each of the four clipped slopes is 1/2, and Adam's first step is slope / (|slope| + eps).
        assert net.weight.tolist() == pytest.approx([-1 / 3] * 4, rel=1e-4)


def test_only_matrices_decay_and_only_trainable_parameters_move() -> None:
    net = Net(torch.float32)
    before = [p.detach().clone() for p in (net.matrix, net.vector, net.frozen)]
    optimizer = MasterAdamW(net, TrainConfig(lr=0.1, weight_decay=0.5))
    net.push(0.0)
    optimizer.step(0)
    torch.testing.assert_close(net.matrix.detach(), before[0] * (1 - 0.1 * 0.5))
    assert torch.equal(net.vector, before[1])
    assert torch.equal(net.frozen, before[2])


def save_and_load_goes_on(
    tmp_path: Path,
    dtype: torch.dtype,
    steps_before: int,
    device: str,
    kind: type[Net] = Net,
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw",
) -> None:
    config = TrainConfig(lr=0.01, weight_decay=0.1, schedule="cosine", steps=20, optimizer=optimizer)
    net = kind(dtype).to(device)
    first = MasterAdamW(net, config)
    for step in range(steps_before):
        net.push_randomly(step)
        first.step(step)
    first.save(tmp_path / "optimizer.safetensors")
    other = kind(dtype, seed=1).to(device)
    other.load_state_dict(net.state_dict())  # what the model's own file does
    storage = [p.data_ptr() for p in other.parameters()]
    again = MasterAdamW(other, config)
    again.load(SafeFolder(tmp_path, "optimizer.safetensors"))
    assert bits(other) == bits(net)
    for step in range(steps_before, steps_before + 5):
        for one, steps in ((net, first), (other, again)):
            one.push_randomly(step)
            steps.step(step)
        assert bits(other) == bits(net)
    assert [p.data_ptr() for p in other.parameters()] == storage


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("steps_before", [0, 1, 7])
def test_a_saved_optimizer_goes_on_in_the_same_bits(tmp_path: Path, dtype: torch.dtype, steps_before: int) -> None:
    save_and_load_goes_on(tmp_path, dtype, steps_before, "cpu")


class Wide(Net):
    """Its matrix is large enough for moments in 8 bits."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__(dtype, seed)
        self.matrix = nn.Parameter(torch.randn(64, 128, generator=torch.Generator().manual_seed(seed)).to(dtype))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("steps_before", [0, 3])
def test_moments_in_8_bits_go_on_in_the_same_bits(tmp_path: Path, dtype: torch.dtype, steps_before: int) -> None:
    pytest.importorskip("torchao")
    save_and_load_goes_on(tmp_path, dtype, steps_before, "cpu", Wide, optimizer="adamw_8bit")
    saved = load_file(tmp_path / "optimizer.safetensors")
    if steps_before:
        assert saved["exp_avg.codes/matrix"].dtype == saved["exp_avg_sq.codes/matrix"].dtype == torch.uint8
        assert "exp_avg/vector" in saved, "what is small stays as it is"
        with pytest.raises(UserError, match=r"has no exp_avg/matrix as train.optimizer=adamw keeps it: write"):
            MasterAdamW(Wide(dtype), TrainConfig()).load(SafeFolder(tmp_path, "optimizer.safetensors"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_moments_in_8_bits_are_nearly_those_in_fp32() -> None:
    pytest.importorskip("torchao")
    nets = [Wide(torch.float32), Wide(torch.float32)]
    configs = [TrainConfig(lr=0.01), TrainConfig(lr=0.01, optimizer="adamw_8bit")]
    optimizers = [MasterAdamW(net, config) for net, config in zip(nets, configs, strict=True)]
    before = nets[0].matrix.detach().clone()
    for step in range(10):
        for net, optimizer in zip(nets, optimizers, strict=True):
            net.push_randomly(step)
            optimizer.step(step)
    moved = (nets[0].matrix - before).norm()
    assert 0 < float((nets[0].matrix - nets[1].matrix).norm()) < 0.05 * float(moved)


def test_moments_in_8_bits_need_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"the package torchao is not installed: run `pip install torchao`, or write"):
        MasterAdamW(Net(torch.float32), TrainConfig(optimizer="adamw_8bit"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_saved_optimizer_goes_on_on_a_gpu(tmp_path: Path, dtype: torch.dtype) -> None:
    save_and_load_goes_on(tmp_path, dtype, 3, "cuda")


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(
    steps=st.integers(1, 60),
    warmup=st.integers(0, 60),
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    lr=st.sampled_from([1e-6, 1.0]),
)
def test_the_learning_rate_rises_then_falls(steps: int, warmup: int, schedule: str, lr: float) -> None:
    warmup = min(warmup, steps)
    config = TrainConfig(lr=lr, steps=steps, warmup_steps=warmup, schedule=schedule)
    course = [learning_rate(config, step) for step in range(steps)]
    assert all(0 < rate <= lr * (1 + 1e-12) for rate in course)
    assert course[:warmup] == sorted(set(course[:warmup]))
    if warmup:
        assert course[0] == pytest.approx(lr / warmup)
        assert course[warmup - 1] == pytest.approx(lr)
    after = course[warmup:]
    assert after == sorted(after, reverse=True)
    if after:
        assert after[0] == pytest.approx(lr)
    if warmup < steps:
        assert learning_rate(config, steps) == pytest.approx(lr if schedule == "constant" else 0.0, abs=1e-12)


def test_the_learning_rate_reaches_the_update() -> None:
    net = nn.Module()
    net.weight = nn.Parameter(torch.zeros(1))
    config = TrainConfig(lr=0.5, warmup_steps=2, schedule="linear", steps=6)
    optimizer = MasterAdamW(net, config)
    for step in range(6):
        before = float(net.weight.detach())
        net.weight.sum().backward()
        optimizer.step(step)
        assert before - float(net.weight.detach()) == pytest.approx(learning_rate(config, step), rel=1e-4)
