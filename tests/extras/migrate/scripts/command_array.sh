cmd=(
  python3 -m verl.trainer.main_ppo
  data.train_batch_size=512
)
for kv in actor_rollout_ref.rollout.n=4 "trainer.experiment_name=from loop"; do cmd+=("$kv"); done
declare -A extra=([trainer.nnodes]=2 [trainer.save_freq]="-1")
extra[trainer.test_freq]=5
for key in "${!extra[@]}"; do cmd+=("$key=${extra[$key]}"); done
"${cmd[@]}"
