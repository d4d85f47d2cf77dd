"""How a timm ViT is spread over devices by ``ModelParallelStrategy``: FSDP2, tensor parallel, or both.

(The classic FSDP strategy needs nothing from here: it wraps the blocks by their class, given in its config.)
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
    """Spreads the network over the mesh, in place.

    Args:
        net: A timm ViT with its weights loaded, the same on every device.
        mesh: Has the dimensions ``data_parallel`` and ``tensor_parallel``.

    Raises:
        MisconfigurationException: The network cannot be cut for tensor parallel.
    """
    if mesh["tensor_parallel"].size() > 1:
        _cut_blocks(net, mesh["tensor_parallel"])
    if mesh["data_parallel"].size() > 1:
        for block in net.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh["data_parallel"])
        fully_shard(net, mesh=mesh["data_parallel"])


def _cut_blocks(net: nn.Module, mesh: DeviceMesh) -> None:
    """Cuts attention by heads and the MLP by hidden units; everything between blocks stays whole on each device."""
    for block in net.blocks:  # type: ignore[union-attr]
        _check_block(block, mesh.size())
        plan: dict[str, ParallelStyle] = {
            "attn.qkv": HeadwiseParallel(),
            "attn.proj": RowwiseParallel(),
            "mlp.fc1": ColwiseParallel(),
            "mlp.fc2": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
        block.attn.num_heads //= mesh.size()
        block.attn.attn_dim //= mesh.size()


def _check_block(block: Any, size: int) -> None:
    attention: Any = getattr(block, "attn", None)
    mlp: Any = getattr(block, "mlp", None)
    plain = type(attention) is Attention and type(mlp) is Mlp
    # Norms of queries and keys or of the heads' output, and gates, would need gradients added up over the devices.
    if not plain or {"q_norm.weight", "norm.weight", "gate.weight"} & set(dict(attention.named_parameters())):
        raise MisconfigurationException(
            f"Tensor parallel cuts timm's plain attention and MLP; {type(block).__name__} of this model has "
            f"{type(attention).__name__} and {type(mlp).__name__} with extras. Use FSDP2 alone: tensor_parallel_size 1."
        )
    for what, count in (("attention heads", attention.num_heads), ("hidden units", mlp.fc1.out_features)):
        if count % size:
            raise MisconfigurationException(
                f"Tensor parallel: {count} {what} cannot be divided among tensor_parallel_size {size} devices."
            )


class HeadwiseParallel(ParallelStyle):
    """Computes query, key and value of this device's heads.

    timm keeps the three matrices in one, so cutting its rows into consecutive parts would give one device queries and
    another one values. The matrix therefore stays whole on each device, under its usual name and in its usual shape;
    each device multiplies by the rows of its heads only, and gradients are added up over the devices.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters()):
            whole = DTensor.from_local(parameter.data, device_mesh, [Replicate()], run_check=False)
            module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        module.forward = lambda x: _linear_of_heads(module, x, device_mesh)
        return module


def _linear_of_heads(module: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Maps ``(B, N, D)`` to ``(B, N, 3 * D / devices)``: query, key and value of this device's heads."""
    rank, size = mesh.get_local_rank(), mesh.size()

    def rows(whole: DTensor) -> Tensor:
        local: Tensor = whole.to_local(grad_placements=[Partial()])
        of_heads: Tensor = local.unflatten(0, (3, size, -1))[:, rank].flatten(0, 1)
        return of_heads

    # Forward nothing happens to x; backward its gradients are added up over the devices.
    x = DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
    result: Tensor = F.linear(x, rows(module.weight), None if module.bias is None else rows(module.bias))
    return result
