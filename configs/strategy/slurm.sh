#!/bin/bash
# sbatch configs/strategy/slurm.sh
#
# Shows:    data parallel over several nodes under SLURM, with one task per device; Lightning reads addresses and ranks
#           from SLURM. Two minutes before its time limit the job gets SIGUSR1, saves a checkpoint and is requeued, to
#           resume from there. RECIPE is the config file; arguments of the script are further options of fit; options of
#           sbatch replace those below. Two tasks on the CPUs of one node:
#           RECIPE=configs/quickstart.yaml sbatch --nodes 1 --ntasks-per-node 2 --gpus-per-node 0 --cpus-per-task 1
#           configs/strategy/slurm.sh --trainer.accelerator cpu --trainer.num_nodes 1 --trainer.devices 2
# Hardware: two nodes with eight GPUs each.
# Measured: not yet measured: needs GPU nodes; measure with the command above. tests/test_slurm.py has run the script on
#           one node without a GPU, SLURM 22.05, as in the example with two tasks: stopped by SIGUSR1 and requeued twice
#           in 30 epochs of quickstart.yaml, it ended with the weights of an uninterrupted run, bit for bit.
#SBATCH --job-name=vit_finetune
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --signal=SIGUSR1@120
#SBATCH --requeue
RECIPE=${RECIPE:-configs/cifar10.yaml}
srun python -m vit_finetune fit --config "$RECIPE" --config configs/strategy/multi_node.yaml \
  --experiment "$(basename "$RECIPE" .yaml)-$SLURM_JOB_ID" --ckpt_path restart "$@"
code=$?
[ "$code" -eq 138 ] && scontrol requeue "$SLURM_JOB_ID"  # 128 + SIGUSR1: stopped and saved
exit "$code"
