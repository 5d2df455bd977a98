# Texts that look like commands, and a job that is one.
cat > note.txt <<NOTE
python3 -m verl.trainer.main_ppo data.train_batch_size=1 'unbalanced
NOTE
cat <<-'END' > config.yaml
	trainer: {nnodes: 99}   # "unbalanced
	END
BATCH=256
sbatch <<EOT
#!/bin/bash
#SBATCH -J run
srun python3 -m verl.trainer.main_ppo data.train_batch_size=$BATCH \
   data.val_files=\$HOME/v.parquet trainer.experiment_name='here doc'
EOT
