"""Load a dataset with the datasets library: from a folder, the Hugging Face hub, or the library's cache."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

HUB_TIMEOUT = 5.0  # seconds for the one request that checks whether a dataset can be downloaded
SAVED = ("dataset_dict.json", "state.json")  # files that save_to_disk writes


def unavailable_reason(path: str, name: str | None) -> str | None:
    """Return one sentence on why a dataset cannot be loaded, ``None`` if it can; download nothing.

    Args:
        path: A folder, or a name on the hub.
        name: Configuration of the dataset.
    """
    if find_spec("datasets") is None:
        return "--data HuggingFace needs the package datasets: pip install 'vit_finetune[hf]'."
    if os.path.isdir(path):
        return None
    if os.path.exists(path):
        return f"--data.path {path} is a file; expected its folder, or a name on the Hugging Face hub."
    if (problem := _hub_problem(path)) and not _is_cached(path, name):
        return (
            f"--data.path {path} is neither a folder nor in the local cache, and {problem}. Set it to a local folder, "
            "set HF_HOME to a cache that contains the dataset, or allow the download (network, no HF_HUB_OFFLINE=1)."
        )
    return None


def load(path: str, name: str | None) -> "Dataset | DatasetDict":
    """Load a dataset; its rows stay in memory-mapped files.

    Raises:
        MisconfigurationException: It cannot be loaded.
    """
    import datasets

    _silence()
    try:
        if any(os.path.isfile(os.path.join(path, file)) for file in SAVED):
            return datasets.load_from_disk(path)
        if os.path.isdir(path):
            return datasets.load_dataset(path, name)
        unreachable = _hub_problem(path) is not None
        if not unreachable and not _is_cached(path, name):
            rank_zero_info(f"downloading {path} from the Hugging Face hub to {datasets.config.HF_DATASETS_CACHE}")
        with _offline(unreachable):
            return datasets.load_dataset(path, name)
    except Exception as error:  # anything from OSError to errors of datasets, pyarrow and the hub
        hint = " Choose one with --data.name." if "onfig name is missing" in str(error) else ""
        raise MisconfigurationException(f"--data.path {path} cannot be loaded: {_reason(error)}.{hint}") from error


def _hub_problem(path: str) -> str | None:
    """Ask the hub for a dataset, by one request with a short timeout; return why it cannot be downloaded."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        HfApi().dataset_info(path, timeout=HUB_TIMEOUT)
    except HFValidationError:
        return "it is not a name on the Hugging Face hub, such as ethz/food101"
    except RepositoryNotFoundError:
        return "the Hugging Face hub has no such public dataset (for a private one: hf auth login)"
    except Exception as error:  # each release of the hub client has its own hierarchy of network errors
        return f"the Hugging Face hub cannot be reached ({_reason(error)})"
    return None


def _is_cached(path: str, name: str | None) -> bool:
    import datasets

    _silence()
    try:
        with _offline(True):
            datasets.load_dataset_builder(path, name)
    except Exception:  # not cached, or not a possible name
        return False
    return True


@contextmanager
def _offline(offline: bool) -> Iterator[None]:
    """Let the library read its cache without asking the hub first, which would take 25 seconds if it is unreachable."""
    from datasets import config

    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = before or offline
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def _silence() -> None:
    """Turn off progress bars, which disturb that of the Trainer, and remarks of the two libraries."""
    import datasets
    import huggingface_hub

    for library in (datasets, huggingface_hub):
        library.utils.disable_progress_bars()
        library.utils.logging.set_verbosity(logging.CRITICAL)  # errors are raised, too


def _reason(error: Exception) -> str:
    """Return the first two lines of an error's message, or of the error that caused it."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]).rstrip(".:") or type(error).__name__
