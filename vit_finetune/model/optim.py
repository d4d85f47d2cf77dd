"""Parameter groups, optimizer and learning-rate schedule, all from timm."""

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
"""``weight_decay`` of a parameter and, with layer decay or a learning rate of its own for the head, ``lr_scale``."""

WRAPPERS = re.compile("_fsdp_wrapped_module[.]|_checkpoint_wrapped_module[.]")
"""Prefixes that FSDP and its activation checkpointing insert into the names of parameters."""


def parameter_rules(
    net: nn.Module, weight_decay: float, layer_decay: float | None, head_lr_scale: float = 1.0
) -> dict[str, Rule]:
    """Return weight decay and learning-rate scale of each trainable parameter, by timm's own rules.

    Norms, biases, class tokens and position embeddings are not decayed (timm's ``no_weight_decay``). The learning rate
    of a parameter is that of the schedule times its ``lr_scale``.

    Args:
        net: The timm network, before a strategy shards it and changes names and shapes.
        weight_decay: Weight decay of weight matrices.
        layer_decay: Factor on the learning rate from each block to the one below it; ``None`` for no layer decay.
        head_lr_scale: Factor on the learning rate of the head.

    Returns:
        The rule of each trainable parameter by its name.
    """
    undecayed: set[str] = getattr(net, "no_weight_decay", set)()
    if layer_decay is None:
        groups = timm.optim.param_groups_weight_decay(net, weight_decay, no_weight_decay_list=undecayed)
    else:
        groups = timm.optim.param_groups_layer_decay(
            net, weight_decay, no_weight_decay_list=undecayed, layer_decay=layer_decay
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
    """Build the optimizer of the parameters that have a rule.

    Args:
        net: The timm network, sharded or not.
        rules: See :func:`parameter_rules`.
        name: One of ``timm.optim.list_optimizers()``.
        lr: Peak learning rate of the head.
        fused: Use the fused implementation if the optimizer has one.

    Raises:
        MisconfigurationException: The optimizer is unknown; the message lists similar names.
        RuntimeError: A strategy renamed a trainable parameter, which would not be trained.
    """
    check_name(name)
    groups: dict[object, dict[str, Any]] = {}
    left = set(rules)
    for key, parameter in net.named_parameters():
        plain = WRAPPERS.sub("", key)
        rule = rules.get(plain)
        if rule is not None:
            left.remove(plain)
            # Tensors on different device meshes cannot share one fused kernel.
            mesh = str(getattr(parameter, "device_mesh", None))
            groups.setdefault((*rule.items(), mesh), {**rule, "params": []})["params"].append(parameter)
    if left:
        raise RuntimeError(f"{len(left)} trainable parameters have no parameter group, such as {min(left)}")
    accepted = inspect.signature(timm.optim.get_optimizer_class(name)).parameters
    options: dict[str, Any] = {"fused": True} if fused and "fused" in accepted else {}
    return timm.optim.create_optimizer_v2(list(groups.values()), opt=name, lr=lr, **options)


def check_name(name: str) -> None:
    """Refuse an optimizer that timm does not know, or that needs second derivatives.

    Raises:
        MisconfigurationException: The message lists similar names.
    """
    known = [str(optimizer) for optimizer in timm.optim.list_optimizers()]
    if name not in known:
        near = difflib.get_close_matches(name, known, 4, 0.4) or known
        raise MisconfigurationException(
            f"--model.optimizer {name!r} is not a timm optimizer. Similar: {', '.join(near)}."
        )
    if timm.optim.get_optimizer_info(name).second_order:
        raise MisconfigurationException(
            f"--model.optimizer {name} needs second derivatives, which training does not compute. Use another "
            "optimizer, such as adamw."
        )


LINEAR_SCALING = ("sgd", "momentum", "lars", "nesterov")  # parts of the names of optimizers


def lr_factor(optimizer: str, batch: int, reference: int | None) -> float:
    """Return the factor that adapts a learning rate to another global batch size.

    The rule is linear for SGD and its variants (Goyal et al. 2017, arXiv:1706.02677) and a square root for adaptive
    optimizers (Malladi et al. 2022, arXiv:2205.10287).

    Args:
        optimizer: timm name.
        batch: Images per optimizer step, over all devices.
        reference: Batch size that the learning rate was chosen for; ``None`` for no scaling.
    """
    if reference is None:
        return 1.0
    ratio = batch / reference
    return ratio if any(part in optimizer for part in LINEAR_SCALING) else math.sqrt(ratio)


def scaled_lr(trainer: Any, optimizer: str, lr: float, reference: int | None) -> float:
    """Return the peak learning rate for the global batch size of a run, and log both.

    Args:
        trainer: Trainer with its data module.
        optimizer: timm name.
        lr: Learning rate as configured.
        reference: Batch size that it was chosen for, see :func:`lr_factor`.
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


class WarmupCosine:
    """Linear warm-up to the optimizer's learning rate, then a half cosine down to ``min_lr`` at the last step.

    The learning rate is a function of the optimizer step alone, without state: a resumed run follows the schedule of
    its own length and peak. Learning rates do not change before :meth:`set_length`.

    Args:
        optimizer: Its parameter groups contain the peak learning rate.
        warmup: Fraction of all optimizer steps spent on warm-up.
        min_lr: Learning rate at the end.
    """

    def __init__(self, optimizer: Optimizer, warmup: float, min_lr: float) -> None:
        self.optimizer = optimizer
        self.warmup = warmup
        self.min_lr = min_lr
        self._cosine: CosineLRScheduler | None = None
        self._ahead = 0

    def set_length(self, steps: int, ahead: int = 0) -> None:
        """Set the number of optimizer steps of the whole run, and the learning rate of the first one.

        Args:
            steps: If every epoch has as many steps as those to come.
            ahead: Steps that are missing in the count of steps done, because the epochs of a resumed run had fewer
                steps than those to come; negative if they had more.
        """
        self._ahead = ahead
        warmup_steps = min(round(self.warmup * steps), steps - 1)
        peak = max(group["lr"] for group in self.optimizer.param_groups)
        self._cosine = CosineLRScheduler(
            self.optimizer,
            t_initial=max(1, steps - warmup_steps),
            lr_min=self.min_lr,
            warmup_t=warmup_steps,
            warmup_lr_init=peak / (warmup_steps + 1),  # not zero, so that the first step counts
            warmup_prefix=True,
            t_in_epochs=False,
        )

    def step_update(self, steps_done: int) -> None:
        """Set the learning rate of the next optimizer step.

        Args:
            steps_done: Optimizer steps since the start of the run.

        Raises:
            RuntimeError: The length of the run was not set.
        """
        if self._cosine is None:
            raise RuntimeError("WarmupCosine.set_length(steps) must be called before step_update")
        self._cosine.step_update(steps_done + self._ahead)

    def state_dict(self) -> dict[str, object]:
        """Return an empty state: the learning rate is a function of the step."""
        return {}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Ignore the state of other schedules."""
