# The same steps that .ci/run takes; run them in a virtual environment made with `make install`.
.PHONY: install test lint types demo bench notebook docs package matrix

install:
	pip install -c constraints.txt -e ".[dev]"

test:
	pytest -n auto

# the tests that touch transformers on every version that is promised; hours: see tests/versions.py for less
matrix:
	python tests/versions.py --keep-going

lint:
	ruff check .
	ruff format --check .

types:
	mypy

demo:
	rope-ext demo

bench:
	python benchmarks/rotary_forward.py

notebook:
	PYTHONWARNINGS=ignore TQDM_DISABLE=1 jupyter nbconvert --to notebook --execute --inplace examples/quickstart.ipynb

docs:
	mkdocs build --strict

package:
	.ci/package
