"""Export of a trained model to a file that does not need this project: ``python -m vit_finetune export``."""
