"""One readable line for what can go wrong while a command runs."""

import torch

from vit_finetune.errors import ExportMismatchError, NonFiniteLossError

OUT_OF_MEMORY = (
    "Out of memory. What helps, the cheapest first: --trainer.precision bf16-mixed; a smaller --data.batch_size, with "
    "--trainer.accumulate_grad_batches to keep the global batch; --model.grad_checkpointing true; a smaller "
    "--model.img_size; --config configs/strategy/fsdp.yaml on several GPUs."
)
NO_SHARED_MEMORY = (
    "The worker processes find no room in /dev/shm to hand over batches. Give a container more of it (docker run "
    "--shm-size 2g, or --ipc host), or do without workers: --data.num_workers 0."
)


def explain(error: Exception) -> str | None:
    """What a user can do about an error, ``None`` for one that only its traceback explains."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        reason = str(error).partition("\n")[0]  # Python's own has none
        return f"{OUT_OF_MEMORY} ({reason})" if reason else OUT_OF_MEMORY
    if "shared memory" in str(error):  # of torch's and of Python's own multiprocessing alike
        return NO_SHARED_MEMORY
    # The last: a full disk, a folder that is a file, no permission.
    if isinstance(error, (NonFiniteLossError, ExportMismatchError, OSError)):
        return str(error)
    return None
