"""Your own images, in one folder per class."""

import os
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from vit_finetune.data.file_listing import find_images, is_image, list_classes, list_folders, read_list
from vit_finetune.data.image_files import ImageFiles
from vit_finetune.data.splits import ALL, SPLITS, Splits, names_split, spellings, split_of


class ImageFolder(ImageFiles):
    """Images in folders named after their classes.

    Two layouts: ``root/train/<class>/*.jpg`` with ``val`` and ``test`` next to ``train``, or a single tree
    ``root/<class>/*.jpg`` that is split at random. Without a ``val`` folder, validation images are split from
    ``train``. Without a ``test`` folder, the command ``test`` uses the validation images and logs that. Usual spellings
    such as ``Training``, ``valid`` or ``testing`` are recognized, and one extra folder around them is skipped. Hidden
    files, system files and files of other types are ignored.

    ``predict`` needs no labels. It reads every image below ``root/test``; if that does not exist, below ``root/val``
    or else ``root``.

    Args:
        root: Folder of the images. For predict also a single image, or a text file with one path per line, absolute
            or relative to the text file's folder.
        kwargs: Options of every data module of image files, see :class:`ImageFiles`.
    """

    def __init__(self, root: str = "data", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root = Path(root)

    @property
    @override
    def title(self) -> str:
        return f"--data.root {self.root}"

    @override
    def unavailable_reason(self) -> str | None:
        return None if self.root.is_dir() else f"{self.title} is not a folder."

    @override
    def prepare_data(self) -> None:
        if not self.root.exists():
            raise MisconfigurationException(f"{self.title} does not exist.")

    @override
    def list_unlabeled(self) -> list[str]:
        if self.root.is_file():
            return [str(self.root)] if is_image(self.root.name) else read_list(self.root)
        trees = self.trees()
        return find_images(trees.get("test") or trees.get("val") or self.root)

    @override
    def list_splits(self) -> Splits:
        splits = {split: list_classes(tree) for split, tree in self.trees().items()}
        if not any(splits.values()):
            raise MisconfigurationException(
                f"{self.title} has no class folders. Expected root/<class>/ or root/train/<class>/."
            )
        return splits

    def trees(self) -> dict[str, Path]:
        """Return the folder of each split, or of ``all`` images if there are no split folders.

        Raises:
            MisconfigurationException: Two folders are the same split, or folders look like splits but have other names.
        """
        root = self._skip_wrapper()
        trees: dict[str, Path] = {}
        others = []
        for folder in list_folders(root):
            split = split_of(folder.name)
            if split is None:
                others.append(folder)
            elif split in trees:
                raise MisconfigurationException(
                    f"{self.title}: {trees[split].name} and {folder.name} both name the {split} split. Keep one."
                )
            else:
                trees[split] = folder
        if trees and (ignored := [folder.name for folder in others if _images(folder)]):
            rank_zero_warn(
                f"{root}: the folders {', '.join(ignored)} are not read, because they are not named after a split "
                f"({spellings()})."
            )
        if not trees and any(names_split(folder.name) for folder in others) and _look_like_splits(others):
            raise MisconfigurationException(
                f"{self.title}: the folders {', '.join(folder.name for folder in others)} hold folders of the same "
                f"names, as splits do. Rename them ({spellings()}), or put the images into one folder per class."
            )
        return {split: _skip_repetition(trees[split], split) for split in SPLITS if split in trees} or {ALL: root}

    def _skip_wrapper(self) -> Path:
        """Return the only folder of the root if it holds the folders of splits or classes, as in many archives."""
        folders = list_folders(self.root)
        if len(folders) != 1 or split_of(folders[0].name) or folders[0].name in (self.known_classes or ()):
            return self.root
        if _images(self.root, below=False) or _images(folders[0], below=False) or not list_folders(folders[0]):
            return self.root  # images of a class
        rank_zero_info(f"{self.root}: reading its only folder, {folders[0].name}")
        return folders[0]


def _skip_repetition(tree: Path, split: str) -> Path:
    """Return ``train/train`` for ``train`` if there is nothing else in it."""
    folders = list_folders(tree)
    return folders[0] if len(folders) == 1 and split_of(folders[0].name) == split else tree


def _look_like_splits(folders: list[Path]) -> bool:
    """Return True if several folders hold no images but folders of the same names."""
    inner = [[entry.name for entry in list_folders(folder)] for folder in folders]
    alike = len(inner) > 1 and all(len(names) > 1 and names == inner[0] for names in inner)
    return alike and not any(_images(folder, below=False) for folder in folders)


def _images(folder: Path, below: bool = True) -> bool:
    """Return True if there are image files in a folder, or in the folders below it."""
    for _, _, names in os.walk(folder):
        if any(map(is_image, names)):
            return True
        if not below:
            break
    return False
