#!/bin/bash
ulimit -n 65535
export VLLM_ATTENTION_BACKEND=XFORMERS
export HF_TOKEN=hf_secret_value RUN_TAG=rpp
mkdir -p logs && cd "$HOME/verl"
CUDA_VISIBLE_DEVICES=0,1,2,3 HYDRA_FULL_ERROR=1 nohup python3 -m verl.trainer.main_ppo \
  algorithm.adv_estimator=reinforce_plus_plus \
  algorithm.gamma=1.0 \
  algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl \
  algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.target_kl=0.1 \
  data.train_files=[$HOME/data/a.parquet,$HOME/data/b.parquet] \
  trainer.experiment_name=$RUN_TAG \
  hydra.run.dir=outputs/x > logs/$RUN_TAG.log 2>&1 &
wait
