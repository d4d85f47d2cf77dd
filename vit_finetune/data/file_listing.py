"""List image files and apply functions to them in parallel, with progress logging."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TypeVar

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from vit_finetune.data.decode import EXTENSIONS
from vit_finetune.errors import ImageDecodeError

# Folders created by archives, network drives and operating systems, in lower case.
SYSTEM_FOLDERS = frozenset(
    {"__macosx", "__pycache__", "@eadir", "#recycle", "#snapshot", "$recycle.bin", "lost+found"}
    | {"system volume information"}
)
REPORT_EVERY = 5.0  # seconds before the first and between two progress messages
AT_ONCE = 1024  # files submitted to the threads at once, to bound the number of waiting tasks
T = TypeVar("T")


def find_images(folder: Path) -> list[str]:
    """List the image files below a folder in a stable order.

    Hidden files and folders, system folders and files of other types are ignored. Symbolic links are followed, but no
    folder is visited twice, nor is a parent of ``folder``. A folder that cannot be opened is listed like an image, so
    that it is reported together with the files that cannot be read.
    """
    return list(log_progress(_walk(os.fspath(folder)), f"{folder}: images found"))


def _walk(top: str) -> Iterator[str]:
    resolved = Path(top).resolve()
    seen = {_identity(folder) for folder in (resolved, *resolved.parents)}
    closed: list[OSError] = []
    for parent, folders, names in os.walk(top, followlinks=True, onerror=closed.append):
        new = []
        for name in sorted(filter(_is_shown, folders)):
            identity = _identity(os.path.join(parent, name))
            if identity not in seen:
                seen.add(identity)
                new.append(name)
        folders[:] = new
        yield from (os.path.join(parent, name) for name in sorted(names) if is_image(name))
    yield from (error.filename for error in closed)


def _identity(folder: str | Path) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def is_image(name: str) -> bool:
    """Return True for the name of an image file that is not hidden."""
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in EXTENSIONS


def _is_shown(folder: str) -> bool:
    return not folder.startswith(".") and folder.lower() not in SYSTEM_FOLDERS


def list_folders(folder: Path) -> list[Path]:
    """List the folders in a folder by name, without hidden and system folders.

    Raises:
        MisconfigurationException: The folder cannot be opened.
    """
    try:
        return sorted(entry for entry in folder.iterdir() if _is_shown(entry.name) and entry.is_dir())
    except OSError as error:
        raise MisconfigurationException(f"{folder} cannot be read: {error.strerror}.") from error


def list_classes(tree: Path) -> dict[str, list[str]]:
    """List the class folders of a tree with their image files.

    Folder names are decoded as UTF-8 in any locale, so that a class has the same name on every machine.

    Raises:
        MisconfigurationException: The tree cannot be opened.
    """
    folders = list_folders(tree)
    return {
        os.fsencode(folder.name).decode(errors="surrogateescape"): find_images(folder)
        for folder in log_progress(folders, f"{tree}: class folders listed", len(folders))
    }


def read_list(file: Path) -> list[str]:
    """Read a text file with one path per line, absolute or relative to its own folder; skip empty lines.

    Raises:
        MisconfigurationException: The file is not text.
    """
    content = file.read_bytes().removeprefix(b"\xef\xbb\xbf")  # byte order mark of some editors
    if b"\0" in content:
        raise MisconfigurationException(
            f"--data.root {file} is neither a folder, an image ({' '.join(sorted(EXTENSIONS))}), nor a text file with "
            "one path per line."
        )
    lines = (line.rstrip(b"\r") for line in content.split(b"\n"))
    return [os.path.join(file.parent, os.fsdecode(line)) for line in lines if line.strip()]


def try_files(function: Callable[[str], T], paths: Sequence[str], doing: str) -> Iterator[T | ImageDecodeError]:
    """Apply a function to files in parallel threads and yield results in order, an error for each broken file.

    Args:
        function: Takes a path; may raise ``ImageDecodeError``.
        paths: The files.
        doing: Label of the progress messages, such as "images checked".
    """

    def attempt(path: str) -> T | ImageDecodeError:
        try:
            return function(path)
        except ImageDecodeError as error:
            return ImageDecodeError(str(error))  # a new one: the traceback of the caught one keeps the image in memory

    def results() -> Iterator[T | ImageDecodeError]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            rest = iter(paths)
            while chunk := list(islice(rest, AT_ONCE)):
                yield from pool.map(attempt, chunk)

    return log_progress(results(), doing, len(paths))


def log_progress(items: Iterable[T], doing: str, total: int | None = None) -> Iterator[T]:
    """Yield the items unchanged; log their number every few seconds."""
    due = time.monotonic() + REPORT_EVERY
    for count, item in enumerate(items, 1):
        if time.monotonic() >= due:
            due = time.monotonic() + REPORT_EVERY
            rank_zero_info(f"{doing}: {count}{f' of {total}' if total else ''}")
        yield item
