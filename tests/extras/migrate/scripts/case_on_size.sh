#!/bin/bash
# bash case_on_size.sh [size]
SIZE=${1:-7b}

case "$SIZE" in
    1.5b|0.5b)
        MODEL=Qwen/Qwen2.5-1.5B; TP=1; MICRO=32
        ;;
    7b)
        MODEL=Qwen/Qwen2.5-7B
        TP=2
        MICRO=16 ;;
    (14b) MODEL=Qwen/Qwen2.5-14B; TP=4; MICRO=8;;
    *)
        echo "unknown size: $SIZE" >&2
        exit 1
        ;;
esac
shift || true

python3 -m verl.trainer.main_ppo \
    actor_rollout_ref.model.path=$MODEL \
    actor_rollout_ref.rollout.tensor_model_parallel_size=$TP \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=$MICRO \
    trainer.experiment_name=ppo_${SIZE} "$@"
