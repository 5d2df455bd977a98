# Groups, subshells, and what they leave behind.
LR=1e-6
( LR=9; cd /tmp; export INNER=1 )
{ WD=0.1; } > /dev/null
true && CLIP=0.2 || CLIP=0.3
false || { MODE=sync; }
[ -d checkpoints ] || mkdir -p checkpoints
[ -z "$LR" ] && LR=5
command -v nvidia-smi > /dev/null && DEVICE=cuda
! false && OK=1
(
  set -e
  python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.optim.lr=$LR actor_rollout_ref.actor.optim.weight_decay=$WD \
    actor_rollout_ref.actor.clip_ratio=$CLIP actor_rollout_ref.rollout.mode=$MODE trainer.nnodes=$OK trainer.device=${DEVICE:-cpu}
) || { echo failed; exit 1; }
