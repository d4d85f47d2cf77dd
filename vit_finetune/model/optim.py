"""Optimizer, parameter groups and learning-rate schedule, all from timm."""

import difflib
import inspect
import math
import re
from typing import Any

import timm.optim
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from timm.scheduler import CosineLRScheduler
from torch import nn
from torch.optim import Optimizer

from vit_finetune.model.vit import head_names

Rule = dict[str, float]
"""``weight_decay`` of a parameter and, with layer decay or another rate for the head, ``lr_scale``."""

WRAPPERS = re.compile("_fsdp_wrapped_module[.]|_checkpoint_wrapped_module[.]")
"""What FSDP and its activation checkpointing put into the names of parameters."""


def parameter_rules(
    net: nn.Module, weight_decay: float, layer_decay: float | None, head_lr_scale: float = 1.0
) -> dict[str, Rule]:
    """Decides by timm's own rules how each trainable parameter is decayed and scaled.

    Norms, biases, class tokens and position embeddings are not decayed (timm's ``no_weight_decay``). With layer decay,
    the rate of a parameter is the schedule's rate times its ``lr_scale``.

    Args:
        net: The timm network, before a strategy shards it: afterwards names and shapes say less.
        weight_decay: For weight matrices.
        layer_decay: Factor on the rate from each block to the one below it; ``None`` for one rate.
        head_lr_scale: Factor on the rate of the head.

    Returns:
        The rule of each trainable parameter by its name.
    """
    spared = net.no_weight_decay() if hasattr(net, "no_weight_decay") else set()  # type: ignore[operator]
    if layer_decay is None:
        groups = timm.optim.param_groups_weight_decay(net, weight_decay, no_weight_decay_list=spared)
    else:
        groups = timm.optim.param_groups_layer_decay(
            net, weight_decay, no_weight_decay_list=spared, layer_decay=layer_decay
        )
    names = {parameter: name for name, parameter in net.named_parameters()}
    rules = {
        names[parameter]: {key: value for key, value in group.items() if key != "params"}
        for group in groups
        for parameter in group["params"]
    }
    if head_lr_scale != 1:
        for name, rule in rules.items():
            if name.startswith(head_names(net)):
                rule["lr_scale"] = rule.get("lr_scale", 1.0) * head_lr_scale
    return rules


def build_optimizer(net: nn.Module, rules: dict[str, Rule], name: str, lr: float, fused: bool) -> Optimizer:
    """Builds the optimizer over the parameters that have a rule.

    Args:
        net: The timm network, sharded or not.
        rules: See :func:`parameter_rules`.
        name: An optimizer of ``timm.optim.list_optimizers()``.
        lr: Peak learning rate of the head.
        fused: Use the one-kernel form if the optimizer has it.

    Raises:
        MisconfigurationException: The optimizer is unknown; similar names are given.
        RuntimeError: A strategy has given a trainable parameter another name, so that it would not be trained.
    """
    check_name(name)
    groups: dict[Any, dict[str, Any]] = {}
    left = set(rules)
    for key, parameter in net.named_parameters():
        plain = WRAPPERS.sub("", key)
        rule = rules.get(plain)
        if rule is not None:
            left.remove(plain)
            # Tensors that are spread over different sets of devices cannot share one fused kernel.
            place = str(getattr(parameter, "device_mesh", None))
            groups.setdefault((*rule.items(), place), {**rule, "params": []})["params"].append(parameter)
    if left:
        raise RuntimeError(f"{len(left)} trainable parameters got lost on the way, such as {min(left)}")
    accepted = inspect.signature(timm.optim.get_optimizer_class(name)).parameters
    options: dict[str, Any] = {"fused": True} if fused and "fused" in accepted else {}
    return timm.optim.create_optimizer_v2(list(groups.values()), opt=name, lr=lr, **options)


def check_name(name: str) -> None:
    """Refuses an optimizer that timm does not know, or that needs second derivatives, which no step here computes.

    Raises:
        MisconfigurationException: Names similar ones.
    """
    known = [str(optimizer) for optimizer in timm.optim.list_optimizers()]
    if name not in known:
        near = difflib.get_close_matches(name, known, 4, 0.4) or known
        raise MisconfigurationException(
            f"--model.optimizer {name!r} is not a timm optimizer. Similar: {', '.join(near)}."
        )
    if timm.optim.get_optimizer_info(name).second_order:
        raise MisconfigurationException(f"--model.optimizer {name} needs second derivatives. Take adamw, for example.")


LINEAR = ("sgd", "momentum", "lars", "nesterov")


def lr_factor(optimizer: str, batch: int, reference: int | None) -> float:
    """Factor on the learning rate for another global batch than the one it was chosen for.

    Linear for SGD and its relatives (Goyal et al. 2017, arXiv:1706.02677), square root for adaptive optimizers (Malladi
    et al. 2022, arXiv:2205.10287).

    Args:
        optimizer: timm's name.
        batch: Images to an optimizer step, over all devices.
        reference: The batch that the rate is meant for; ``None`` for no scaling.
    """
    if reference is None:
        return 1.0
    ratio = batch / reference
    return ratio if any(word in optimizer for word in LINEAR) else math.sqrt(ratio)


def scaled_lr(trainer: Any, optimizer: str, lr: float, reference: int | None) -> float:
    """Says what the global batch is, and what learning rate it gets.

    Args:
        trainer: With its data module.
        optimizer: timm's name.
        lr: As typed.
        reference: The batch that it is meant for, see :func:`lr_factor`.
    """
    per_device = getattr(trainer.datamodule, "batch_size", None)
    if per_device is None:
        return lr
    devices = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
    batch = per_device * devices * trainer.accumulate_grad_batches
    lr *= lr_factor(optimizer, batch, reference)
    parts = f"{per_device} per device x {devices} x {trainer.accumulate_grad_batches} accumulated"
    rank_zero_info(f"global batch {batch} = {parts}; peak learning rate {lr:.3g}")
    return lr


class WarmupCosine(CosineLRScheduler):
    """Linear warm-up to the optimizer's rate, then a half cosine down to ``min_lr`` at the last optimizer step.

    The rate is a function of the step alone and keeps no state: a resumed run with a new length or rate follows the
    schedule that was asked for.

    Args:
        optimizer: Its groups hold the peak rate.
        steps: Optimizer steps of the whole run.
        warmup: Share of the steps spent on warm-up.
        min_lr: Rate at the end.
    """

    def __init__(self, optimizer: Optimizer, steps: int, warmup: float, min_lr: float) -> None:
        warmup_steps = min(round(warmup * steps), steps - 1)
        peak = max(group["lr"] for group in optimizer.param_groups)
        super().__init__(
            optimizer,
            t_initial=max(1, steps - warmup_steps),
            lr_min=min_lr,
            warmup_t=warmup_steps,
            warmup_lr_init=peak / (warmup_steps + 1),  # the first step counts: it does not start from zero
            warmup_prefix=True,
            t_in_epochs=False,
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing: the rate is a function of the step."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Ignores the state of other schedules."""
