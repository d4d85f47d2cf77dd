#!/bin/bash
# sbatch configs/strategy/slurm.sh
#
# Shows:    two nodes with eight GPUs each under SLURM. The tasks of a node are as many as its devices; Lightning reads
#           addresses and ranks from SLURM, and on SIGUSR1 saves and puts the job back into the queue.
# Hardware: two nodes with eight GPUs each.
# Measured: not yet measured; the script was read, not run.
#SBATCH --job-name=vit_finetune
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --signal=SIGUSR1@120
srun python -m vit_finetune fit --config configs/cifar10.yaml --config configs/strategy/multi_node.yaml
