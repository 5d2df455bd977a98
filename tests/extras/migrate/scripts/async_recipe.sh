#!/usr/bin/env bash
set -xeuo pipefail

rollout_mode="async"
rollout_name="vllm" # sglang or vllm
if [ "$rollout_mode" = "async" ]; then
    export VLLM_USE_V1=1
    return_raw_chat="True"
fi

NNODES_ROLLOUT=${NNODES_ROLLOUT:-1}
NNODES_TRAIN=${NNODES_TRAIN:-1}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-8}
rollout_prompts=$(((512*400)))
staleness_threshold=0.1

python -m recipe.fully_async_policy.fully_async_main \
    data.train_batch_size=0 data.gen_batch_size=1 \
    data.return_raw_chat=${return_raw_chat} \
    actor_rollout_ref.hybrid_engine=False \
    actor_rollout_ref.rollout.name=${rollout_name} \
    actor_rollout_ref.rollout.mode=${rollout_mode} \
    trainer.nnodes="${NNODES_TRAIN}" trainer.n_gpus_per_node="${NGPUS_PER_NODE}" \
    rollout.nnodes="${NNODES_ROLLOUT}" rollout.n_gpus_per_node="${NGPUS_PER_NODE}" \
    rollout.total_rollout_steps="${rollout_prompts}" \
    async_training.staleness_threshold="${staleness_threshold}" \
    async_training.trigger_parameter_sync_step=4 \
    async_training.partial_rollout=True
