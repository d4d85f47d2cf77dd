"""Console noise that comes from inside the libraries and asks nothing of the user, one filter a source."""

import logging
import warnings


def filter_library_chatter() -> None:
    """Silences known messages; everything else stays."""
    # Advertisements for other products, and a device that hardly any reader has.
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        _Drop("litlogger", "litmodels", "TPU available")
    )
    # Lightning reads the length of the data for the schedule; nothing is wrong.
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        _Drop("to estimate number of stepping batches")
    )
    # The table of parameters estimates megabytes in 32 bits whatever the precision.
    warnings.filterwarnings("ignore", message=".*is not supported by the model summary.*")
    # Lightning's own use of a function that PyTorch is about to rename.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated.*")
    # Images held in memory need no workers; for files the README says when to add some.
    warnings.filterwarnings("ignore", message=".*does not have many workers which may be a bottleneck.*")
    # The module logs at the end of each epoch, however short it is.
    warnings.filterwarnings("ignore", message=".*is smaller than the logging interval.*")
    # Remarks about images that can be read nevertheless; those that cannot are named in an error.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    # main([...]) in a notebook: the other words that Lightning warns of are those of the kernel.
    warnings.filterwarnings("ignore", message=".*args parameter is intended to run from within Python.*")


class _Drop(logging.Filter):
    def __init__(self, *words: str) -> None:
        super().__init__()
        self.words = words

    def filter(self, record: logging.LogRecord) -> bool:
        return not any(word in record.getMessage() for word in self.words)
