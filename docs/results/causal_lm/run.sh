#!/usr/bin/env bash
# The runs of docs/results/causal_lm: docs/results/causal_lm/run.sh TEXT [FOLDER] [PARTS], from the repository's root, with the
# venv active. PARALLEL runs at a time (2), one thread each; run it again to resume.
# Then: python docs/results/causal_lm/table.py FOLDER
set -euo pipefail
text=$1 out=${2:-runs/causal_lm} parts=${3:-"gates rates new-seeds"}
mkdir -p "$out"
export OMP_NUM_THREADS=1
jobs() {  # lines of gate, learning rate and seed
  for part in $parts; do
    case $part in
      gates) jobs_of "0 1 2" 2e-3 "dense dense-wide topk sigmoid hash hash+ comet comet+ relu" ;;
      rates) jobs_of 0 "5e-4 1e-3" "dense hash"; jobs_of 0 1e-3 relu; jobs_of 0 4e-3 dense ;;
      new-seeds) for seed in 3 4 5 6; do jobs_of "$seed" 1e-3 "dense hash"; jobs_of "$seed" 2e-3 relu; done ;;
      *) echo "there is no part $part" >&2; exit 2 ;;
    esac
  done
}
jobs_of() {  # seeds, learning rates, gates
  for seed in $1; do for rate in $2; do for gate in $3; do
    echo "$gate $rate $seed"
  done; done; done
}
jobs | xargs -r -P "${PARALLEL:-2}" -L 1 bash -c '
  run='"$out"'/$0-$1-$2
  [ -s $run.json ] || { python examples/causal_lm.py --data '"$text"' --gate $0 --lr $1 --seed $2 --steps '"${STEPS:-400}"' --json \
    > $run.part 2>> '"$out"'.log && mv $run.part $run.json; } || echo "failed: $0 $1 $2" >&2'
