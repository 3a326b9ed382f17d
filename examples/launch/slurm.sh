#!/bin/sh
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
# One process a task; use --ntasks-per-node=<GPUs of a node> and --gpus-per-task=1 with GPUs.
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=29500
srun python examples/launch/launch.py
