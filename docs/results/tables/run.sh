#!/usr/bin/env bash
# The runs of docs/results/tables: docs/results/tables/run.sh DATA [FOLDER], from the repository's root, with the venv
# active and PEER the python of an environment with torch-rechub. Two runs at a time, one thread each; run it again to
# resume. Then: python docs/results/tables/table.py FOLDER
set -euo pipefail
data=$1
out=${2:-runs/tables}
here=$(dirname "$0")
export OMP_NUM_THREADS=1
[ -f "$out/data/movielens/test.parquet" ] || python "$here/prepare.py" "$data" "$out/data"
common() {  # data set
  local of=$out/data/$1 targets
  [ "$1" = census ] && targets=income_50k,never_married || targets=liked,loved
  echo "data.path=$of/train.parquet data.options.validation=$of/validation.parquet data.options.test=$of/test.parquet"
  echo "data.options.targets=[$targets] training.threads=1"
}
peer_sizes="model.experts=8 model.units=[32] model.embedding=8 model.head=[8] model.dropout=0"
peer_sizes+=" training.epochs=10 training.learning_rate=1e-3 training.schedule=constant"
networks() {
  cat <<LIST
dense         gate=dense
mmoe          gate=softmax
ple           gate=softmax model.mixture=ple
topk          gate=topk
comet         gate=comet
comet+        gate=comet+
mmoe-small    gate=softmax $peer_sizes
LIST
}
for set in census movielens; do
  for seed in 0 1 2; do
    networks | while read -r name settings; do
      line="comet-moe train table"
      for setting in $(common $set) $settings seed=$seed; do line+=" --set $setting"; done
      echo "$line --out $out/$set/$name-$seed --resume"
    done
    [ -z "${PEER:-}" ] || echo "$PEER $here/peer.py $out/data/$set $out/$set/torch-rechub-$seed --seed $seed"
  done
done | xargs -P "${PARALLEL:-2}" -I {} bash -c '{} > /dev/null 2>> '"$out.log"' || echo "failed: {}" >&2'
for set in census movielens; do
  for seed in 0 1 2; do python "$here/trees.py" "$out/$set/mmoe-0" "$out/$set/trees-$seed"; done
done
