"""Forecast of the memory that a fit takes on each device, computed on tensors without values."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from vit_finetune.model.config import ViTConfig
from vit_finetune.model.precision import compute_dtype, is_mixed, parameter_dtype, trainer_precision

# Dimension along which RowwiseParallel and ColwiseParallel split a parameter; see parallel.py.
TENSOR_PARALLEL = {"attn.proj.weight": 1, "mlp.fc1.weight": 0, "mlp.fc1.bias": 0, "mlp.fc2.weight": 1}


@dataclass(frozen=True)
class Layout:
    """Distribution of a network over devices.

    Attributes:
        shards: Number of devices over which parameters, gradients and optimizer state are sharded (FSDP).
        tensor_parallel: Number of devices over which the matrices of each block are split.
        buckets: Whether DDP keeps a copy of the gradients for communication.
    """

    shards: int = 1
    tensor_parallel: int = 1
    buckets: bool = False


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
        parameters: All parameters.
        gradients: Gradients of the trainable parameters.
        optimizer: Optimizer state; ``None`` if only a run with values can tell.
        activations: Tensors that the forward pass saves for the backward pass.
        buckets: Copy of the gradients that DDP communicates.
        average: EMA of the trainable parameters, in float32 or wider.
    """

    parameters: int
    gradients: int
    optimizer: int | None
    activations: int
    buckets: int = 0
    average: int = 0

    @property
    def total(self) -> int:
        """Sum of the parts; temporary buffers of kernels and memory of the libraries are not included."""
        return sum(size or 0 for size in vars(self).values())

    def __str__(self) -> str:
        parts = [
            f"{name} {'unknown' if size is None else _readable(size)}" for name, size in vars(self).items() if size != 0
        ]
        return f"{'at least ' if self.optimizer is None else ''}{_readable(self.total)} = {' + '.join(parts)}"


def of_fit(trainer: Trainer, config: ViTConfig, num_classes: int, batch_size: int) -> Memory:
    """Return the forecast for a configured run.

    Args:
        trainer: Configured Trainer; it need not have started.
        config: Options of the model.
        num_classes: Number of outputs of the head.
        batch_size: Images per device.
    """
    device = trainer.strategy.root_device.type
    precision = trainer_precision(trainer)
    return forecast(config, num_classes, batch_size, precision=precision, device=device, layout=layout_of(trainer))


def layout_of(trainer: Trainer) -> Layout:
    """Return the distribution of the network that a configured Trainer will set up."""
    strategy = trainer.strategy
    if isinstance(strategy, FSDPStrategy):
        return Layout(shards=trainer.world_size)
    if isinstance(strategy, ModelParallelStrategy):
        # Private, since the public device mesh exists only once the processes have started.
        size = strategy._tensor_parallel_size
        tensor_parallel = trainer.num_devices if size == "auto" else int(size)
        return Layout(max(1, trainer.world_size // tensor_parallel), tensor_parallel)
    return Layout(
        buckets=isinstance(strategy, DDPStrategy) and not ddp_options(strategy).get("gradient_as_bucket_view")
    )


def ddp_options(strategy: Strategy) -> dict[str, Any]:
    """Return the arguments that a strategy passes on to ``DistributedDataParallel``; empty if it is not DDP."""
    # Private, since DistributedDataParallel itself is created later.
    return strategy._ddp_kwargs if isinstance(strategy, DDPStrategy) else {}


def forecast(
    config: ViTConfig,
    num_classes: int,
    batch_size: int,
    *,
    precision: str = "32-true",
    device: str = "cpu",
    layout: Layout = Layout(),
) -> Memory:
    """Return the memory that training keeps on the device that needs most.

    Parameters, gradients and optimizer state are exact, except for FSDP1, which shards flattened blocks instead of
    single parameters and pads less. Activations are those of the uncompiled network on one device.

    Args:
        config: Options of the model.
        num_classes: Number of outputs of the head.
        batch_size: Images per device.
        precision: As in ``--trainer.precision``.
        device: Type of device. Attention kernel and autocast are those of ``cuda``, or those of ``cpu`` for all others.
        layout: Distribution of the network over devices.
    """
    from vit_finetune.model import lora, vit

    device = "cuda" if device == "cuda" else "cpu"
    net: Any = lora.build_meta(config, num_classes)
    net.to(parameter_dtype(precision))
    vit.set_attention_kernel(net, torch.device(device), compute_dtype(precision))
    if config.grad_checkpointing:
        net.set_grad_checkpointing(True)
    local = {name: _local_part(name, parameter, layout) for name, parameter in net.named_parameters()}
    trained = [local[name] for name, parameter in net.named_parameters() if parameter.requires_grad]
    gradients = sum(tensor.nbytes for tensor in trained)
    return Memory(
        parameters=sum(tensor.nbytes for tensor in local.values()),
        gradients=gradients,
        optimizer=_optimizer_bytes(trained, config.optimizer),
        activations=_activation_bytes(net, vit.data_config(config)["size"], batch_size, precision, device),
        buckets=gradients if layout.buckets else 0,
        average=0 if config.ema is None else sum(max(4, tensor.itemsize) * tensor.numel() for tensor in trained),
    )


def _local_part(name: str, parameter: Tensor, layout: Layout) -> Tensor:
    """Return a meta tensor of the largest part of a parameter that one device holds."""
    shape = list(parameter.shape)
    split = next((dim for ending, dim in TENSOR_PARALLEL.items() if name.endswith(ending)), None)
    if split is not None:
        shape[split] //= layout.tensor_parallel
    shape[0] = -(-shape[0] // layout.shards)  # the first devices hold one row more if rows are left over
    return torch.empty(shape, dtype=parameter.dtype, device="meta")


def _optimizer_bytes(trained: list[Tensor], name: str) -> int | None:
    """Step the optimizer once on meta tensors and add up its state; ``None`` if a step depends on values."""
    import timm.optim

    from vit_finetune.model import optim

    optim.check_name(name)
    parameters = [nn.Parameter(tensor) for tensor in trained]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    try:
        optimizer: Any = timm.optim.create_optimizer_v2([{"params": parameters}], opt=name, lr=1e-3)
        optimizer.step()
    except (RuntimeError, NotImplementedError, AssertionError):  # the last one if PyTorch was built without CUDA
        return None
    states = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in states if isinstance(value, Tensor))


def _activation_bytes(net: nn.Module, size: tuple[int, int], batch_size: int, precision: str, device: str) -> int:
    """Return the bytes saved for the backward pass.

    Assumption: they are a linear function of the batch size; the constant part are 16-bit copies of the weights. The
    line is drawn through batches of two and four images, since with one image some operations save a view, not a copy.
    """
    # Private, since nothing public runs CUDA kernels without values; torch.export and torch.compile trace with it.
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        net.to_empty(device=device)
        two, four = (saved_bytes(net, torch.zeros(count, 3, *size, device=device), precision) for count in (2, 4))
    return two + (four - two) * (batch_size - 2) // 2


def saved_bytes(net: nn.Module, images: Tensor, precision: str) -> int:
    """Return the bytes that a forward pass with its loss saves for the backward pass, parameters not included.

    Args:
        net: A classifier.
        images: float32, shape ``(B, 3, H, W)``; with values, or without under ``FakeTensorMode``.
        precision: As in ``--trainer.precision``.
    """
    parameters = {storage_id(parameter) for parameter in net.parameters()}
    saved: dict[StorageWeakRef, int] = {}

    def save(tensor: Tensor) -> Tensor:
        if (key := storage_id(tensor)) not in parameters:
            saved[key] = tensor.untyped_storage().nbytes()
        return tensor

    half = compute_dtype(precision) if is_mixed(precision) else None
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        with torch.autocast(images.device.type, half, enabled=half is not None):
            logits = net(images.to(parameter_dtype(precision)))
        loss = F.cross_entropy(logits.float(), torch.zeros(len(images), dtype=torch.long, device=images.device))
        assert loss.requires_grad
    return sum(saved.values())


def storage_id(tensor: Tensor) -> StorageWeakRef:
    """Return a hashable reference to the memory of a tensor, equal for all views of it; values are not needed."""
    return StorageWeakRef(tensor.untyped_storage())


def _readable(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"
