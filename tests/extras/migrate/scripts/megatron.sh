set -x
# Megatron back-end: another configuration file, keys that only it has.
export CUDA_DEVICE_MAX_CONNECTIONS=1 # For megatron communication/computation overlapping
HF_MODEL_PATH=Qwen/Qwen3-30B-A3B
offload=True
train_path=$HOME/data/math/train.parquet
python3 -m verl.trainer.main_ppo --config-path=config \
    --config-name='ppo_megatron_trainer.yaml' \
    algorithm.adv_estimator=grpo \
    data.train_files="['$train_path']" \
    actor_rollout_ref.model.path=$HF_MODEL_PATH \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \
    actor_rollout_ref.actor.megatron.param_offload=${offload} \
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \
    ++actor_rollout_ref.ref.megatron.override_transformer_config.recompute_num_layers=1 \
    ~actor_rollout_ref.rollout.layer_name_map \
    trainer.logger='["console"]' $@
