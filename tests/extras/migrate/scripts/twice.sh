# Keys given again, then a second stage.
python3 -m verl.trainer.main_ppo data.train_batch_size=128 trainer.total_epochs=1 data.train_batch_size=256 $MORE_ARGS ""
python3 -m verl.trainer.main_ppo trainer.total_epochs=2
python3 examples/merge.py --out merged
