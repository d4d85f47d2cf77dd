#!/bin/bash
# sbatch configs/strategy/slurm.sh
#
# Shows:    data parallel over several nodes under SLURM, with one task per device; Lightning reads addresses and ranks
#           from SLURM. Two minutes before its time limit the job gets SIGUSR1, saves a checkpoint and is requeued, to
#           resume from there.
# Hardware: two nodes with eight GPUs each.
# Measured: not yet measured; the script has not been run.
#SBATCH --job-name=vit_finetune
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --signal=SIGUSR1@120
#SBATCH --requeue
srun python -m vit_finetune fit --config configs/cifar10.yaml --config configs/strategy/multi_node.yaml \
  --experiment "cifar10-$SLURM_JOB_ID" --ckpt_path restart
code=$?
[ "$code" -eq 138 ] && scontrol requeue "$SLURM_JOB_ID"  # 128 + SIGUSR1: stopped and saved
exit "$code"
