#!/bin/bash
# What commands print, where that can be told without running them.
PROJECT_DIR="$(pwd)"
MODEL=$HOME/models/Qwen2.5-7B-Instruct
NAME=$(basename "$MODEL")
SHORT=$(echo "${NAME%-Instruct}")
files=("$HOME/a.parquet" "$HOME/b.parquet")
LIST=$(IFS=,; echo "${files[*]}")
pick() { local n=$1; if [ "$n" -gt 4 ]; then echo big; else echo small; fi; }
NGPU=$(nvidia-smi -L | wc -l)
echo "found $NGPU GPUs on $(hostname)"
python3 -m verl.trainer.main_ppo \
  data.train_files="[$LIST]" \
  +trainer.dir=$PROJECT_DIR/out \
  trainer.experiment_name=$SHORT-$(pick 8)-$(printf '%s_%d' v 3) \
  trainer.project_name=$(basename grpo_math.sh .sh) \
  actor_rollout_ref.model.path=$(dirname $MODEL)/other
