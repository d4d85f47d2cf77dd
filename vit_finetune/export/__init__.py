"""A trained model as a file that works without this project: ``python -m vit_finetune export``."""
