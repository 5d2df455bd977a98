EXP=ssh_run
ssh -o StrictHostKeyChecking=no trainer01 "source ~/.bashrc; cd verl && nohup bash -c 'python3 -m verl.trainer.main_ppo trainer.experiment_name=$EXP data.seed=7' > out.log 2>&1 &"
