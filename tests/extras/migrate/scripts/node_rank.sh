#!/bin/bash
# Only the first node starts the run.
MASTER_PORT=6379
if [ "$NODE_RANK" -eq 0 ]; then
    ray start --head --port=$MASTER_PORT
    python3 -m verl.trainer.main_ppo trainer.nnodes=2 actor_rollout_ref.rollout.n=5
else
    ray start --address="$MASTER_ADDR:$MASTER_PORT" --block
fi
