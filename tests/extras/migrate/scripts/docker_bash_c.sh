# The command stands in a string for a container's shell.
N=4
docker run --gpus all --shm-size=10g -v "$PWD":/workspace -e N=$N verl:latest \
  bash -lc "cd /workspace && export A=1 && python3 -m verl.experimental.fully_async_policy.fully_async_main \
    --config-name=fully_async_ppo_trainer async_training.require_batches=$N \
    data.train_files=\"['\$HOME/data/x.parquet']\" 'trainer.logger=[\"console\"]'"
