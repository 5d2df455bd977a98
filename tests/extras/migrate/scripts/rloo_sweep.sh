# One run per learning rate and seed: the first is read.
for lr in 1e-6 5e-7 2e-6; do
  for seed in {1..3}; do
    python3 -m verl.trainer.main_ppo algorithm.adv_estimator=rloo \
      actor_rollout_ref.actor.optim.lr=$lr data.seed=$seed \
      trainer.experiment_name="rloo_lr${lr}_s${seed}"
  done
done
