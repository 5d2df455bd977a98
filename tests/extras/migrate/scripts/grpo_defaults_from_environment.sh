#!/usr/bin/env bash
# Every setting can be given from outside.
set -euo pipefail

MODEL_PATH=${MODEL_PATH:-"Qwen/Qwen2.5-3B-Instruct"}
DATA_DIR="${DATA_DIR:-$HOME/data}"
: "${ROLLOUT_N:=8}"
N_GPUS=${N_GPUS-4}
TAG=${TAG:+_$TAG}

python3 -u -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=${DATA_DIR}/gsm8k/train.parquet \
    data.val_files="${DATA_DIR}/gsm8k/test.parquet" \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.rollout.n=$ROLLOUT_N \
    trainer.n_gpus_per_node=$N_GPUS \
    trainer.default_local_dir=$CKPT_ROOT/grpo \
    trainer.experiment_name="grpo_n${ROLLOUT_N}${TAG}"
