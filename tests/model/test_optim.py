"""Parameter groups, and the schedule with its length."""

import math
from pathlib import Path

import pytest
import timm
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from timm.models.vision_transformer import Block
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from tests.conftest import CPU, TINY_KWARGS, TINY_MODEL, make_tree, scalars
from vit_finetune import main
from vit_finetune.model.optim import WarmupCosine, build_optimizer, parameter_rules


def network() -> torch.nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=3, **TINY_KWARGS)


def names_by_group(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[set[str]]:
    names = {parameter: name for name, parameter in net.named_parameters()}
    return [{names[parameter] for parameter in group["params"]} for group in optimizer.param_groups]


def test_norms_biases_tokens_and_positions_are_not_decayed() -> None:
    net = network()
    optimizer = build_optimizer(net, parameter_rules(net, 0.05, None), "adamw", 1e-3, fused=True)
    by_decay = dict(
        zip([g["weight_decay"] for g in optimizer.param_groups], names_by_group(net, optimizer), strict=True)
    )
    assert set(by_decay) == {0.0, 0.05}
    matrices = {n for n, p in net.named_parameters() if p.ndim > 1 and n not in ("cls_token", "pos_embed")}
    assert by_decay[0.05] == matrices
    assert by_decay[0.0] == {n for n, _ in net.named_parameters()} - matrices
    assert optimizer.defaults["fused"] is True


def test_layer_decay_scales_by_depth() -> None:
    net = network()
    optimizer = build_optimizer(net, parameter_rules(net, 0.05, 0.5), "adamw", 1.0, fused=False)
    WarmupCosine(optimizer, warmup=0.0, min_lr=0.0).set_length(10)
    lr = {}
    for group, names in zip(optimizer.param_groups, names_by_group(net, optimizer), strict=True):
        lr |= dict.fromkeys(names, group["lr"])
    assert lr["head.weight"] == 1.0
    assert lr["blocks.1.mlp.fc1.weight"] == 2 * lr["blocks.0.mlp.fc1.weight"]
    assert lr["blocks.0.mlp.fc1.weight"] == 2 * lr["patch_embed.proj.weight"] == 2 * lr["pos_embed"]


@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_head_has_its_own_learning_rate(layer_decay: float | None) -> None:
    net = network()
    rules = parameter_rules(net, 0.05, layer_decay, head_lr_scale=10.0)
    optimizer = build_optimizer(net, rules, "adamw", 0.1, fused=False)
    WarmupCosine(optimizer, warmup=0.0, min_lr=0.0).set_length(10)
    lr = {}
    for group, names in zip(optimizer.param_groups, names_by_group(net, optimizer), strict=True):
        lr |= dict.fromkeys(names, group["lr"])
    assert lr["head.weight"] == lr["head.bias"] == pytest.approx(1.0)
    assert lr["blocks.1.mlp.fc1.weight"] == pytest.approx(0.1 * (layer_decay or 1))


def test_frozen_parameters_are_left_out() -> None:
    net = network()
    net.requires_grad_(False)
    net.head.requires_grad_(True)
    optimizer = build_optimizer(net, parameter_rules(net, 0.05, 0.75), "adamw", 1e-3, fused=True)
    assert set().union(*names_by_group(net, optimizer)) == {"head.weight", "head.bias"}


def test_unknown_optimizer_is_refused_with_similar_names() -> None:
    with pytest.raises(MisconfigurationException, match=r"'adamv' is not a timm optimizer. Similar: .*adamw"):
        build_optimizer(network(), {}, "adamv", 1e-3, fused=False)


def test_second_derivatives_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match="adahessian needs second derivatives"):
        build_optimizer(network(), {}, "adahessian", 1.0, fused=False)


def test_no_parameter_is_lost_by_what_strategies_wrap() -> None:
    """FSDP's activation checkpointing renames parameters; one with an unknown name must not be left untrained."""
    net = network()
    rules = parameter_rules(net, 0.05, None)
    plain = build_optimizer(net, rules, "adamw", 1.0, fused=False)
    apply_activation_checkpointing(net, check_fn=lambda module: isinstance(module, Block))
    assert any("_checkpoint_wrapped_module" in name for name, _ in net.named_parameters())
    wrapped = build_optimizer(net, rules, "adamw", 1.0, fused=False)
    assert [len(g["params"]) for g in wrapped.param_groups] == [len(g["params"]) for g in plain.param_groups]
    net.head = torch.nn.Sequential(net.head)
    with pytest.raises(RuntimeError, match=r"2 trainable parameters have no parameter group, such as head\.bias"):
        build_optimizer(net, rules, "adamw", 1.0, fused=False)


def test_schedule_values() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = WarmupCosine(optimizer, warmup=0.2, min_lr=0.01)
    with pytest.raises(RuntimeError, match="set_length"):
        schedule.step_update(0)
    assert optimizer.param_groups == [{**optimizer.param_groups[0], "lr": 1.0}]
    schedule.set_length(20)
    learning_rates = []
    for step in range(21):
        schedule.step_update(step)
        learning_rates.append(optimizer.param_groups[0]["lr"])
    assert learning_rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert learning_rates[12] == pytest.approx((1.0 + 0.01) / 2)  # halfway
    assert learning_rates[20] == pytest.approx(0.01) and learning_rates[19] == pytest.approx(0.0195, abs=1e-3)
    assert len(set(learning_rates)) == 21


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_very_short_runs_have_a_schedule(steps: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = WarmupCosine(optimizer, warmup=1.0, min_lr=0.0)
    schedule.set_length(steps)
    for step in range(steps):
        schedule.step_update(step)
        assert 0 < optimizer.param_groups[0]["lr"] <= 1.0


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ([], 20),
        (["--trainer.accumulate_grad_batches=2"], 12),
        (["--trainer.limit_train_batches=3"], 12),
        (["--trainer.max_steps=7"], 7),
        (["--trainer.max_epochs=-1", "--trainer.max_steps=7"], 7),
    ],
)
def test_schedule_ends_with_the_run(tmp_path: Path, options: list[str], steps: int) -> None:
    """Four epochs of five batches: the learning rate rises, falls, and almost reaches its minimum at the end."""
    tree = make_tree(tmp_path / "images", {"train": 6, "val": 1}, side=32)
    main(
        ["fit", *TINY_MODEL, *CPU, "--data=ImageFolder", f"--data.root={tree}", "--data.batch_size=4"]
        + ["--trainer.max_epochs=4", "--trainer.log_every_n_steps=1", "--model.lr=1", "--model.min_lr=0", *options]
    )
    points = dict(scalars(tmp_path / "runs")["train/lr"])
    warmup = round(0.1 * steps)
    assert sorted(points) == list(range(steps))
    assert max(points, key=points.__getitem__) == warmup and points[warmup] == pytest.approx(1.0)
    assert points[steps - 1] == pytest.approx(0.5 * (1 + math.cos(math.pi * (1 - 1 / (steps - warmup)))), abs=1e-6)
