set -x
BSZ=1024
python3 -m verl.trainer.main_ppo \
  data.train_batch_size=$BSZ \
  trainer.logger="[console]" # last
