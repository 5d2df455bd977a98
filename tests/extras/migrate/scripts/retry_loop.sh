# Starts again until it succeeds.
n=0
until [ $n -ge 5 ]; do
  if uv run --no-sync python -m verl.trainer.main_ppo trainer.resume_mode=auto trainer.max_actor_ckpt_to_keep=2; then
    break
  fi
  n=$((n+1)); sleep 30
done
