# The command is put together in a string.
CMD="python3 -m verl.trainer.main_ppo"
CMD="$CMD algorithm.adv_estimator=grpo"
CMD+=" trainer.logger=\"['console']\""
if [ "${DEBUG:-0}" == "1" ]; then
  CMD="$CMD trainer.total_training_steps=2"
fi
NAME="two words"
CMD+=" trainer.experiment_name='$NAME' $@"
echo "$CMD"
eval $CMD
