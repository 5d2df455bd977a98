#!/bin/bash
USE_LORA=true
GPUS=8
WITH_KL=0

if [ "$USE_LORA" = "true" ]; then
    LORA="actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.model.lora_alpha=32"
else
    LORA=""
fi

if [[ $GPUS -ge 16 ]]; then
    NNODES=$((GPUS / 8))
elif [[ $GPUS -eq 8 && -n "$USE_LORA" ]]; then
    NNODES=1
else
    NNODES=0
fi

if (( WITH_KL )); then
    KL=True
else
    KL=False
fi

if [ -f "$HOME/.cache/warm_start/config.json" ]; then
    MODEL=$HOME/.cache/warm_start
else
    MODEL=Qwen/Qwen2.5-0.5B-Instruct
fi

if [ -z "$REWARD_FILE" ]; then
    REWARD_FILE=rewards/math.py
fi

if [[ "$MODEL" == Qwen/* ]]; then NAME=qwen; fi
if ! [[ $MODEL =~ ^meta ]]; then FAMILY=other; else FAMILY=meta; fi

python3 -m verl.trainer.main_ppo \
    actor_rollout_ref.model.path=$MODEL $LORA \
    actor_rollout_ref.actor.use_kl_loss=$KL \
    custom_reward_function.path=$REWARD_FILE \
    trainer.experiment_name=${NAME}_${FAMILY} \
    trainer.nnodes=$NNODES
