#!/usr/bin/env bash
# Every gate on MultiMNIST, Jester and CelebA: docs/results/datasets/run.sh DATA [FOLDER] [SETS] [SEEDS] [WORKERS]
# DATA has the folders mnist, jester and celeba; run it again to resume. Then: python docs/results/datasets/table.py
# SETTINGS="loss.alpha=0.1 ..." changes settings, for another FOLDER.
set -euo pipefail
data=$1 out=${2:-studies/datasets} sets=${3:-"multimnist jester celeba"} seeds=${4:-2} workers=${5:-2}
prepare() { python "$(dirname "$0")/prepare.py" "$data" "$out/data" "$1"; }
study() {  # name, gates, settings
  local name=$1 gates=$2 settings=()
  shift 2
  for setting in data.any_size=true training.threads=1 "$@" ${SETTINGS:-}; do settings+=(--set "$setting"); done
  comet-moe ablate "$name" "${settings[@]}" --gates "$gates" --seeds "$seeds" --workers "$workers" --out "$out/$name" --resume
}
gates=dense,dense-per-task,softmax,topk,topk+,dselect,comet,comet+
images=(training.batch_size=128 training.learning_rate=1e-3 training.epochs=40 training.patience=5 search.epochs=3)
for name in $sets; do
  case $name in
    multimnist) study multimnist "$gates" "data.path=$data/mnist" data.options.train_size=4000 \
      data.options.validation_size=2000 data.options.test_size=4000 "${images[@]}" ;;
    jester) prepare jester; study jester "$gates,hash,hash+" "data.path=$out/data/jester" training.patience=10 ;;
    # Four filters per convolution learn slowly: the dense network's loss still fell after 40 epochs.
    celeba) prepare celeba; study celeba "$gates" "data.path=$out/data/celeba" "${images[@]}" training.epochs=300 ;;
  esac
done
