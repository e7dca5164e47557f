#!/usr/bin/env bash
# The runs of docs/routing.md: docs/results/routing/run.sh DATA [FOLDER]
# DATA has the folders movielens-1m, mnist, fashion-mnist and book-crossing. PARALLEL runs at a time (2), one thread each; run it again to
# resume. Then: python docs/results/routing/table.py FOLDER
set -euo pipefail
data=$1
out=${2:-runs/routing}
export OMP_NUM_THREADS=1
small="data.options.train_size=6000 data.options.validation_size=2000 data.options.test_size=4000"
networks() {  # settings of COMET, epochs of warm-up
  cat <<LIST
dense        gate=dense
softmax      gate=softmax
topk         gate=topk
comet        gate=comet $1
comet-info   gate=comet $1 gate.information=1
topk-warm    gate=topk gate.warmup_epochs=$2
comet-warm   gate=comet $1 gate.information=1 gate.warmup_epochs=$2
LIST
}
runs() {  # recipe, its settings, those of COMET, epochs of warm-up
  for seed in 0 1 2; do
    networks "$3" "$4" | while read -r name settings; do
      line="comet-moe train $1"
      for setting in $2 $settings seed=$seed training.threads=1; do line+=" --set $setting"; done
      echo "$line --out $out/$1/$name-$seed --resume"
    done
  done
}
{
  runs mnist-fashion "data.path=$data $small training.epochs=8" "gate.gamma=1 gate.entropy=0.05" 3
  runs movielens-200k \
    "data.path=$data/movielens-1m data.split=authors training.learning_rate=2e-4 training.epochs=15 training.patience=3" \
    "gate.gamma=1 gate.entropy=0.5" 6
  for seed in 0 1 2 3 4; do  # one choice of experts for both tasks of a row
    for name in softmax joint4 joint3; do
      line="comet-moe train books --set data.path=$data/book-crossing --set data.any_size=true --set gate=softmax"
      line+=" --set training.patience=5 --set training.threads=1 --set seed=$seed"
      [ $name = softmax ] || line+=" --set joint.k_shared=${name#joint}"
      echo "$line --out $out/books/$name-$seed --resume"
    done
  done
} | xargs -P "${PARALLEL:-2}" -I {} bash -c '{} > /dev/null 2>> '"$out.log"' || echo "failed: {}" >&2'
