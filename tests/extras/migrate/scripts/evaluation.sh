set -x
data_path=$HOME/data/math/test.parquet
save_path=$HOME/data/math/answers.parquet

python3 -m verl.trainer.main_generation \
    trainer.nnodes=1 \
    data.path=$data_path \
    data.output_path=$save_path

python3 -m verl.trainer.main_eval \
    data.path=$save_path \
    data.prompt_key=prompt \
    data.response_key=responses \
    custom_reward_function.path=recipe/r1/reward_score.py \
    custom_reward_function.name=reward_func
