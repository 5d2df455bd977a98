accelerate launch --num_processes 8 --main_process_port 29501 --mixed_precision bf16 -m verl.trainer.sft_trainer \
  data.train_files=sft/train.parquet \
  model.partial_pretrain=Qwen/Qwen2.5-0.5B \
  model.lora_rank=32 model.lora_alpha=16 model.target_modules=all-linear \
  optim.lr_scheduler=wsd \
  ulysses_sequence_parallel_size=2 use_remove_padding=true
