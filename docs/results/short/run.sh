#!/usr/bin/env bash
# The runs of docs/results/short: docs/results/short/run.sh DATA [OUT], from the repository's root, with the venv active.
# DATA holds a folder for each data set. Two runs at a time, one thread each; run it again to resume.
set -euo pipefail
data=$1
out=${2:-runs/results}
settings() {
  case $1 in
    movielens)         echo "data.path=$data/movielens-1m data.split=authors training.epochs=1 search.epochs=1" ;;
    movielens-100k)    echo "data.path=$data/movielens-100k training.epochs=5 search.epochs=2" ;;
    jester)            echo "data.path=$data/jester training.epochs=1 search.epochs=1" ;;
    books)             echo "data.path=$data/book-crossing training.epochs=40 search.epochs=5" ;;
    multimnist)        echo "data.path=$data/mnist data.options.train_size=8000 data.options.validation_size=2000 data.options.test_size=2000 training.epochs=2 search.epochs=1" ;;
    multifashionmnist) echo "data.path=$data/fashion-mnist data.options.train_size=8000 data.options.validation_size=2000 data.options.test_size=2000 training.epochs=2 search.epochs=1" ;;
    celeba)            echo "data.path=$data/celeba training.epochs=1 search.epochs=1" ;;
  esac
}
for recipe in books movielens-100k multifashionmnist jester celeba multimnist movielens; do
  for gate in softmax topk comet comet+; do
    line="comet-moe train $recipe --set gate=$gate --set data.any_size=true --set training.threads=1"
    for setting in $(settings "$recipe"); do line+=" --set $setting"; done
    echo "$line --out $out/$recipe-$gate --resume"
  done
done | xargs -P 2 -I {} bash -c 'OMP_NUM_THREADS=1 {} > /dev/null'
