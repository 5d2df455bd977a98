#!/bin/bash
# Helper functions and a main.
log() { echo "[$(date +%T)] $*"; }

die() {
    log "error: $1" >&2
    exit 1
}

function model_args {
    local path=$1 tp=${2:-1}
    ARGS+=(actor_rollout_ref.model.path="$path")
    ARGS+=(actor_rollout_ref.rollout.tensor_model_parallel_size=$tp)
}

train() {
    local algo=$1
    shift
    log "starting $algo"
    python3 -m verl.trainer.main_ppo algorithm.adv_estimator=$algo "${ARGS[@]}" "$@"
}

main() {
    path=outer
    ARGS=(data.train_batch_size=256)
    model_args "Qwen/Qwen2.5-7B Instruct" 4
    [ -n "$path" ] || die "no path"
    train rloo trainer.experiment_name=$path trainer.total_epochs=3 "$@"
}

main "$@"
