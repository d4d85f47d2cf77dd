"""How much memory a fit will take on each device, before it runs."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn

# What RowwiseParallel and ColwiseParallel cut, and along which dimension; see parallel.py.
TENSOR_PARALLEL = {"attn.proj.weight": 1, "mlp.fc1.weight": 0, "mlp.fc1.bias": 0, "mlp.fc2.weight": 1}


@dataclass(frozen=True)
class Layout:
    """How a network is spread over devices.

    Attributes:
        shards: Devices that share parameters, gradients and optimizer state among them (FSDP).
        tensor_parallel: Devices that share the matrices of each block.
        buckets: Whether gradients are kept a second time, to be sent (DDP).
    """

    shards: int = 1
    tensor_parallel: int = 1
    buckets: bool = False


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
        parameters: The weights.
        gradients: Of what is trained.
        optimizer: State of the optimizer; ``None`` where it can only be known by running it.
        activations: What the forward pass keeps for the backward pass.
        buckets: Copy of the gradients that DDP sends.
        average: Moving average of what is trained, in 32 bits at least.
    """

    parameters: int
    gradients: int
    optimizer: int | None
    activations: int
    buckets: int = 0
    average: int = 0

    @property
    def total(self) -> int:
        """All of it; what kernels need for a moment, and what libraries take, comes on top."""
        return sum(size or 0 for size in vars(self).values())

    def __str__(self) -> str:
        parts = [
            f"{name} {'unknown' if size is None else _readable(size)}" for name, size in vars(self).items() if size != 0
        ]
        return f"{'at least ' if self.optimizer is None else ''}{_readable(self.total)} = {' + '.join(parts)}"


def of_fit(trainer: Trainer, hparams: Any, classes: int, batch_size: int) -> Memory:
    """The forecast for a configured run.

    Args:
        trainer: As configured.
        hparams: The model's options.
        classes: Size of the head.
        batch_size: Images per device.
    """
    return forecast(
        hparams, classes, batch_size, str(trainer.precision), trainer.strategy.root_device.type, _layout(trainer)
    )


def _layout(trainer: Trainer) -> Layout:
    strategy: Any = trainer.strategy
    if isinstance(strategy, FSDPStrategy):
        return Layout(shards=trainer.world_size)
    if isinstance(strategy, ModelParallelStrategy):
        data, tensor = strategy._data_parallel_size, strategy._tensor_parallel_size
        return Layout(
            trainer.num_nodes if data == "auto" else int(data),
            trainer.num_devices if tensor == "auto" else int(tensor),
        )
    bucketed = isinstance(strategy, DDPStrategy) and not strategy._ddp_kwargs.get("gradient_as_bucket_view")
    return Layout(buckets=bucketed)


def forecast(
    hparams: Any,
    classes: int,
    batch_size: int,
    precision: str = "32-true",
    device: str = "cpu",
    layout: Layout = Layout(),
) -> Memory:
    """Finds out on tensors without values what training will keep in memory.

    Parameters, gradients and optimizer state are exact, but for FSDP1, which cuts flattened blocks and not each
    parameter and so pads less. Activations are those of the uncompiled network on one device.

    Args:
        hparams: The model's options.
        classes: Size of the head.
        batch_size: Images per device.
        precision: The Trainer's, such as ``bf16-mixed``.
        device: Attention kernel and autocast are those of ``cuda``, or of ``cpu`` for any other kind.
        layout: How the network is spread.

    Returns:
        Bytes on the device that has most.
    """
    from vit_finetune.model import lora, vit

    device = "cuda" if device == "cuda" else "cpu"
    net = vit.build_meta(hparams, classes)
    if hparams["lora_rank"]:
        lora.add(net, hparams["lora_rank"])
    net.to(_parameter_dtype(precision))
    vit.choose_attention(net, torch.device(device), precision)
    if hparams["grad_checkpointing"]:
        net.set_grad_checkpointing(True)  # type: ignore[operator]
    local = {name: _local(name, parameter, layout) for name, parameter in net.named_parameters()}
    trained = [local[name] for name, parameter in net.named_parameters() if parameter.requires_grad]
    gradients = sum(tensor.nbytes for tensor in trained)
    size = vit.data_config(*(hparams[key] for key in ("name", "img_size", "timm_kwargs", "mean", "std")))["size"]
    return Memory(
        parameters=sum(tensor.nbytes for tensor in local.values()),
        gradients=gradients,
        optimizer=_optimizer_bytes(trained, hparams["optimizer"]),
        activations=_activation_bytes(net, size, batch_size, precision, device),
        buckets=gradients if layout.buckets else 0,
        average=sum(tensor.numel() * max(4, tensor.itemsize) for tensor in trained)
        if hparams["ema"] is not None
        else 0,
    )


def _parameter_dtype(precision: str) -> torch.dtype:
    true = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
    return true.get(precision, torch.float32)


def _local(name: str, parameter: Tensor, layout: Layout) -> Tensor:
    """This device's part of a parameter, a meta tensor: the largest, where a dimension cannot be divided evenly."""
    shape = list(parameter.shape)
    cut = next((dim for ending, dim in TENSOR_PARALLEL.items() if name.endswith(ending)), None)
    if cut is not None:
        shape[cut] //= layout.tensor_parallel
    shape[0] = -(-shape[0] // layout.shards)
    return torch.empty(shape, dtype=parameter.dtype, device="meta")


def _optimizer_bytes(trained: list[Tensor], name: str) -> int | None:
    """Steps the optimizer once without values, and adds up its state.

    Optimizers that decide by values cannot be stepped so.
    """
    import timm.optim

    from vit_finetune.model import optim

    optim.check_name(name)
    parameters = [nn.Parameter(tensor) for tensor in trained]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    try:
        optimizer: Any = timm.optim.create_optimizer_v2([{"params": parameters}], opt=name, lr=1e-3)
        optimizer.step()
    except (RuntimeError, NotImplementedError, AssertionError):  # the last where it would need CUDA to be built
        return None
    states = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in states if isinstance(value, Tensor))


def _activation_bytes(net: nn.Module, size: tuple[int, int], batch_size: int, precision: str, device: str) -> int:
    """Bytes saved for the backward pass, a linear function of the batch size.

    Taken from batches of two and four: with one image some copies are left out. What does not grow with the batch
    are 16-bit copies of the weights.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        net.to_empty(device=device)
        two, four = (saved_bytes(net, torch.zeros(count, 3, *size, device=device), precision) for count in (2, 4))
    return two + (four - two) * (batch_size - 2) // 2


def saved_bytes(net: nn.Module, images: Tensor, precision: str) -> int:
    """Bytes that a forward pass with its loss keeps for the backward pass, besides the parameters.

    Args:
        net: A classifier.
        images: float32, shape ``(B, 3, H, W)``; real, or without values under ``FakeTensorMode``.
        precision: The Trainer's.
    """
    own = {parameter.untyped_storage()._cdata for parameter in net.parameters()}
    kept: dict[int, Any] = {}  # holds the storages, so that none of their addresses is used again

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    half = torch.bfloat16 if precision.startswith("bf16") else torch.float16
    autocast = torch.autocast(images.device.type, half, enabled=precision.endswith("16-mixed"))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with autocast:
            logits = net(images.to(_parameter_dtype(precision)))
        loss = F.cross_entropy(logits.float(), torch.zeros(len(images), dtype=torch.long, device=images.device))
        assert loss.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


def _readable(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"
