"""One fine-tuning task in six frameworks, measured side by side: ``python -m vit_finetune benchmark --frameworks``.

Plain PyTorch, Lightning Fabric, Hugging Face Accelerate, Lightning's Trainer, the Hugging Face Trainer and this
project's command line train the same network from the same weights, on the same batches in the same order, with the
same augmentation, optimizer and schedule. Each has a file of its own here, short enough to compare by reading;
``task.py`` holds what they share.
"""
