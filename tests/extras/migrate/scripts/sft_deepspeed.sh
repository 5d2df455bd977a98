HOSTS="--include localhost:0,1"
deepspeed $HOSTS --module verl.trainer.fsdp_sft_trainer model.partial_pretrain=$BASE/gemma-2b data.max_length=$(expr 1024 + 1024)
