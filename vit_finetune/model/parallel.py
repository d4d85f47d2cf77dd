"""Distribution of a timm ViT over devices for ``ModelParallelStrategy``: FSDP2, tensor parallel, or both.

``FSDPStrategy`` (FSDP1) needs nothing from here: it wraps the blocks by their class, which its config names.
"""

from typing import Any

import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from timm.layers import Attention, Mlp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module


def shard(net: nn.Module, mesh: DeviceMesh) -> None:
    """Distribute the network over the mesh, in place.

    Args:
        net: A timm ViT with its weights loaded, equal on every device.
        mesh: Device mesh with the dimensions ``data_parallel`` and ``tensor_parallel``.

    Raises:
        MisconfigurationException: The network does not support tensor parallel.
    """
    if mesh["tensor_parallel"].size() > 1:
        _parallelize_blocks(net, mesh["tensor_parallel"])
    if mesh["data_parallel"].size() > 1:
        for block in net.get_submodule("blocks").children():
            fully_shard(block, mesh=mesh["data_parallel"])
        fully_shard(net, mesh=mesh["data_parallel"])


def _parallelize_blocks(net: nn.Module, mesh: DeviceMesh) -> None:
    """Split attention by heads and the MLP by hidden units; what is between the blocks is replicated."""
    block: Any
    for block in net.get_submodule("blocks").children():
        check_block(block, mesh.size())
        plan: dict[str, ParallelStyle] = {
            "attn.qkv": HeadwiseParallel(),
            "attn.proj": RowwiseParallel(),
            "mlp.fc1": ColwiseParallel(),
            "mlp.fc2": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
        block.attn.num_heads //= mesh.size()
        block.attn.attn_dim //= mesh.size()


def check_block(block: Any, size: int) -> None:
    """Refuse a block that tensor parallel cannot split.

    Args:
        block: A block of a timm ViT.
        size: Number of devices, ``tensor_parallel_size``.

    Raises:
        MisconfigurationException: Attention or MLP is not timm's plain one, or a dimension is not divisible.
    """
    attention: Any = getattr(block, "attn", None)
    mlp: Any = getattr(block, "mlp", None)
    plain = type(attention) is Attention and type(mlp) is Mlp
    # Norms of queries, keys or the output of the heads, and gates, would need gradients summed over the devices.
    if not plain or {"q_norm.weight", "norm.weight", "gate.weight"} & set(dict(attention.named_parameters())):
        raise MisconfigurationException(
            f"Tensor parallel supports timm's plain attention and MLP; {type(block).__name__} of this model has "
            f"{type(attention).__name__} and {type(mlp).__name__} with extras. Use FSDP2 only: tensor_parallel_size 1."
        )
    for parts, count in (("attention heads", attention.num_heads), ("hidden units", mlp.fc1.out_features)):
        if count % size:
            raise MisconfigurationException(
                f"Tensor parallel: the number of {parts}, {count}, is not divisible by tensor_parallel_size {size}."
            )


class HeadwiseParallel(ParallelStyle):
    """Compute query, key and value of the heads of each device.

    timm keeps the three matrices in one, so splitting its rows into consecutive parts would give queries to one device
    and values to another. The matrix is therefore replicated, with its usual name and shape; each device multiplies by
    the rows of its heads only, and gradients are summed over the devices.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters()):
            whole = DTensor.from_local(parameter.data, device_mesh, [Replicate()], run_check=False)
            module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        module.forward = lambda x: _linear_of_heads(module, x, device_mesh)
        return module


def _linear_of_heads(module: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Map ``(B, N, D)`` to ``(B, N, 3 * D / devices)``: query, key and value of the heads of this device."""
    rank, size = mesh.get_local_rank(), mesh.size()

    def rows(whole: DTensor) -> Tensor:
        local: Tensor = whole.to_local(grad_placements=[Partial()])
        of_heads: Tensor = local.unflatten(0, (3, size, -1))[:, rank].flatten(0, 1)
        return of_heads

    # The identity in the forward pass; in the backward pass the gradients of x are summed over the devices.
    x = DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
    result: Tensor = F.linear(x, rows(module.weight), None if module.bias is None else rows(module.bias))
    return result
