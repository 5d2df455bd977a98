set -x
BSZ=16
python3 -m verl.trainer.main_ppo \
  data.train_batch_size=$BSZ \
  trainer.logger="[console]" # last
