python3 -m verl.trainer.main_ppo
