# The model is chosen by a variable from outside: the default branch is read.
case $MODEL_FAMILY in
  llama) MODEL=meta-llama/Llama-3.1-8B-Instruct; TEMPLATE=llama ;;
  *) MODEL=Qwen/Qwen3-8B; TEMPLATE=qwen ;;
esac
case "$(uname -m)" in
  aarch64) ENFORCE=True ;;
  x86_64) ENFORCE=False ;;
  *) ENFORCE=False ;;
esac
python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=$MODEL \
  actor_rollout_ref.rollout.enforce_eager=$ENFORCE trainer.experiment_name=$TEMPLATE
