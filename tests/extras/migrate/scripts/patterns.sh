MODEL=${MODEL_ROOT:=$HOME/models}/Qwen2.5-7B-Instruct.v2
BASE=${MODEL##*/}
LOW=${BASE,,}
ALGO=grpo
declare -a EMPTY=()
grpo_lr=3e-6
which_lr=${ALGO}_lr
FILE=data/math.train.parquet
python3 -m verl.trainer.main_ppo trainer.a=$BASE trainer.b=${LOW} trainer.c=${ALGO^^} trainer.d=${BASE%%.*} trainer.e=${BASE%.*} \
  trainer.f=${BASE/Qwen/Q} trainer.g=${BASE//2/two} trainer.h=${BASE:0:4} trainer.i=${BASE: -2} trainer.j=${!which_lr} \
  trainer.k=${#ALGO} "${EMPTY[@]}" trainer.l=${FILE#data/} trainer.m=${FILE/%.parquet/.jsonl} trainer.n=${MODEL%/*} \
  trainer.o=${ALGO/#g/G} trainer.p=${#EMPTY[@]} trainer.q=${UNSET:-${ALGO:-x}y} trainer.{r,s}=1 trainer.t=${ALGO:+set}
