#!/bin/bash
# Arguments in arrays, one per concern.
COMMON=(
    algorithm.adv_estimator=grpo     # group relative
    algorithm.use_kl_in_reward=False
)
DATA=(
    "data.train_files=['$HOME/data/deepscaler/train.parquet','$HOME/data/orz/train.parquet']"
    data.val_files=$HOME/data/aime/test.parquet
    data.max_response_length=8192
)
ACTOR=(actor_rollout_ref.actor.optim.lr=1e-6)
ACTOR+=(
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28
)
ACTOR+=("actor_rollout_ref.actor.loss_agg_mode=token-mean")
nodes=(node0 node1 node2 node3)
EXTRA=("$@")

python -m verl.trainer.main_ppo "${COMMON[@]}" "${DATA[@]}" ${ACTOR[@]} \
    trainer.nnodes=${#nodes[@]} \
    trainer.experiment_name="on-${nodes[0]}" \
    trainer.project_name=${nodes[-1]} \
    "${EXTRA[@]}"
