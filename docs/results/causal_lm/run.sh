#!/usr/bin/env bash
# The runs of docs/results/causal_lm: docs/results/causal_lm/run.sh TEXT [FOLDER] [PARTS], from the repository's root, with the
# venv active. PARALLEL runs at a time (2), one thread each; run it again to resume.
# Then: python docs/results/causal_lm/table.py FOLDER
set -euo pipefail
text=$1 out=${2:-runs/causal_lm} parts=${3:-"gates rates new-seeds"}
mkdir -p "$out"
export OMP_NUM_THREADS=1
tested="dense hash relu"
jobs() {  # lines of gate, learning rate and seed
  for part in $parts; do
    case $part in
      gates) jobs_of "0 1 2" 2e-3 "dense dense-wide topk sigmoid hash hash+ comet comet+ relu" ;;
      rates) jobs_of "0 1 2" "1e-3 4e-3" "$tested" ;;
      new-seeds) jobs_of "3 4 5 6 7 8" 2e-3 "$tested" ;;
      *) echo "there is no part $part" >&2; exit 2 ;;
    esac
  done
}
jobs_of() {  # seeds, learning rates, gates
  for seed in $1; do for rate in $2; do for gate in $3; do
    echo "$gate $rate $seed"
  done; done; done
}
jobs | xargs -P "${PARALLEL:-2}" -L 1 bash -c '
  run='"$out"'/$0-$1-$2
  [ -s $run.json ] || { python examples/causal_lm.py --data '"$text"' --gate $0 --lr $1 --seed $2 --steps '"${STEPS:-400}"' --json \
    > $run.part 2>> '"$out"'.log && mv $run.part $run.json; } || echo "failed: $0 $1 $2" >&2'
