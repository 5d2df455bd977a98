#!/bin/bash
# Options of its own, then the rest for the trainer.
MODEL=Qwen/Qwen2.5-0.5B
EPOCHS=1
POSITIONAL=()
while [[ $# -gt 0 ]]; do
  case $1 in
    -m|--model) MODEL="$2"; shift 2 ;;
    --epochs=*) EPOCHS="${1#*=}"; shift ;;
    *) POSITIONAL+=("$1"); shift ;;
  esac
done
while getopts "x:" opt; do case $opt in x) X=$OPTARG ;; esac; done
python -m verl.trainer.main_ppo actor_rollout_ref.model.path=$MODEL trainer.total_epochs=$EPOCHS "${POSITIONAL[@]}" "${@:1}"
