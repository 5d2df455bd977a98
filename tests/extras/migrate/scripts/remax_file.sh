# Started by path, wrapped in timing and buffering commands.
STAMP=`date +%Y%m%d`
exec time stdbuf -oL -eL timeout 48h python3 -u ./verl/trainer/main_ppo.py algorithm.adv_estimator=remax \
	data.train_files=~/data/gsm8k/train.parquet \
	trainer.experiment_name=remax-$STAMP trainer.project_name=`whoami`-runs |& tee -a run_$STAMP.log
