#!/usr/bin/env bash
# Why is COMET lower on Books? docs/results/books/controls.sh DATA [FOLDER] [WORKERS]
# DATA has the folder book-crossing; run it again to resume. Then: python docs/results/books/table.py FOLDER
set -euo pipefail
data=$1 out=${2:-studies/books-controls} workers=${3:-2}
study() {  # name, gate, seeds, settings
  local name=$1 gate=$2 seeds=$3 settings=()
  shift 3
  for setting in "data.path=$data/book-crossing" data.any_size=true training.threads=1 "$@"; do settings+=(--set "$setting"); done
  comet-moe ablate books "${settings[@]}" --gates "$gate" --seeds "$seeds" --workers "$workers" --out "$out/$name" --resume
}
study k1 dense 5 gate.k=1                                        # narrower: as costly as one expert, as two
study k2 dense 5 gate.k=2
study slow dense 5 gate.k=1 training.learning_rate=5e-5          # the lowest rate of the paper's search space
study one-expert comet 5 gate.k=1                                # one tree: one expert per task, and the entropy loss
study no-entropy comet 3 gate.entropy=0                          # four trees that nothing makes hard
