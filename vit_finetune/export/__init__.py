"""A trained model as a file that works without this project: ``python -m vit_finetune export``."""


class Disagreement(RuntimeError):
    """The exported file does not answer as the checkpoint does."""
